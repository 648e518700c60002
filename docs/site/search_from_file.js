// Browsers start no worker for a page that was opened from a file. There, the search's worker runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => resolve(frame.contentWindow);
      });
      window.__fromWorker = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc = `<script>
        window.postMessage = parent.__fromWorker;
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.head.append(script);
        })), Promise.resolve());
      </script><script src="${new URL(url, document.baseURI)}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then((window) => window.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
