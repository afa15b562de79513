// A page opened as a file may start no worker: its search runs in a hidden frame instead. Material asks for a script
// of this name and would otherwise take one from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((done) => {
        this.frame.addEventListener("load", () => done(this.start(url)), { once: true });
      });
      document.body.append(this.frame);
    }

    start(url) {
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      script.src = url;
      return new Promise((done) => {
        script.addEventListener("load", () => done(inner), { once: true });
        inner.document.head.append(script);
      });
    }

    async postMessage(data) {
      const inner = await this.ready;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
