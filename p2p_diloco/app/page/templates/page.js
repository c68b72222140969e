// Renews the parts of the page that changed. Without this script the page is the same, and reloads itself.
"use strict";
let busy = false;
let again = false;

async function renew() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const response = await fetch(location.href, { cache: "no-store" });
    if (!response.ok) throw new Error(response.statusText);
    document.getElementById("stale").hidden = true;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const other = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
      if (other === null || part.innerHTML === other.innerHTML) continue;
      const [x, y] = [part.scrollLeft, part.scrollTop];
      const link = part.contains(document.activeElement) && document.activeElement.getAttribute("href");
      part.replaceChildren(...other.childNodes);
      part.scrollTo(x, y);
      if (link) for (const same of part.querySelectorAll("a")) if (same.getAttribute("href") === link) same.focus();
    }
  } catch {
    document.getElementById("stale").hidden = false;
  } finally {
    busy = false;
    if (again) { again = false; setTimeout(renew, 250); }
  }
}

let timer = 0;
const live = new EventSource("live");
live.onmessage = () => { clearInterval(timer); timer = 0; if (!document.hidden) renew(); };
live.onerror = () => { renew(); if (timer === 0) timer = setInterval(renew, 15000); };
document.addEventListener("visibilitychange", () => { if (!document.hidden) renew(); });

for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  });
}
