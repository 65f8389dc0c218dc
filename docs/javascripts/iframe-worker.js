"use strict";
// Search in pages opened from disk: browsers start no worker there, so a hidden frame is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = src => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src, onload: resolve, onerror: reject });
        inside.document.head.append(script);
      });
      inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = load(String(url)).then(() => inside);
    }
    postMessage(data) {
      this.loaded.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
