// Fills the list of versions from versions.json, which lies beside the folders of the versions:
//   /versions.json   [{"version": "0.2.0", "url": "/0.2/"}, {"version": "0.1.0", "url": "/0.1/"}]
//   /0.2/index.html, /0.1/index.html
// Without that file, the list shows the version of this site only.
"use strict";

(async () => {
  const box = document.querySelector(".versions");
  if (!box || location.protocol === "file:") return;
  const root = new URL(box.dataset.root || "./", location.href);
  const answer = await fetch(new URL("../versions.json", root)).catch(() => null);
  if (!answer || !answer.ok) return;
  const list = box.querySelector("select");
  const options = (await answer.json()).map(({ version, url }) => {
    const option = new Option(version, new URL(url, root).href);
    option.selected = version === box.dataset.version;
    return option;
  });
  if (!options.some((option) => option.selected)) {
    options.unshift(new Option(box.dataset.version, "", true, true));
  }
  list.replaceChildren(...options);
  list.addEventListener("change", async () => {
    // The same page of the other version, if it has one.
    const page = location.href.slice(root.href.length);
    const same = new URL(page, list.value);
    const there = await fetch(same, { method: "HEAD" }).catch(() => null);
    location.href = there && there.ok ? same.href : list.value;
  });
})();
