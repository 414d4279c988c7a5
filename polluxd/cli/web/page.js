"use strict";
// Puts the newest part of the page in place of the last; the server has escaped every text in it.
const main = document.querySelector("main");
const state = document.getElementById("state");
let last = "";
let good = Date.now();

async function part(address) {
  const answer = await fetch(address, { cache: "no-store" });
  const text = await answer.text();
  if (!answer.ok) {
    const failure = new DOMParser().parseFromString(text, "text/html");
    throw new Error((failure.querySelector("p") ?? failure.body).textContent.trim());
  }
  return text;
}

async function refresh(pause) {
  try {
    const text = document.hidden ? last : await part(location.pathname + (location.search ? location.search + "&part" : "?part"));
    if (text !== last && document.activeElement?.tagName !== "INPUT") {
      const focus = document.activeElement && document.activeElement.getAttribute("href");
      main.innerHTML = last = text;
      if (focus) main.querySelector(`a[href="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
    }
    good = Date.now();
    state.textContent = "";
  } catch (error) {
    state.textContent = `; not live: what you see is ${Math.round((Date.now() - good) / 1000)} s old (${error.message})`;
  }
  main.classList.toggle("stale", state.textContent !== "");
  setTimeout(refresh, pause, pause);
}
setTimeout(refresh, 1000 * main.dataset.interval, 1000 * main.dataset.interval);
