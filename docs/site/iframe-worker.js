// Browsers start no worker for a page that was opened from a disk: there the search runs in a hidden
// frame instead. (A site that a server sends does not need this.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open();
      page.write("<body></body>");
      page.close();
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = url;
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      page.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

// Error messages are pasted into the search: nothing in them is an operator of its language.
const Given = window.Worker;
window.Worker = class extends Given {
  postMessage(message, ...rest) {
    const isQuery = message.type === 2;
    const words = isQuery ? message.data.replace(/[^\w.]+|\.(?!\w)/g, " ").trim() : "";
    super.postMessage(isQuery ? { ...message, data: words } : message, ...rest);
  }
};
