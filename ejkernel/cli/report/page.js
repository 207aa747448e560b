"use strict";
{
  const form = document.querySelector(".filters");
  const status = document.querySelector("[role=status]");
  const tip = document.getElementById("tip");
  const fields = [...form.querySelectorAll("select")];

  const matches = (element, chosen) =>
    (!chosen.dtype || element.dataset.dtype === chosen.dtype) &&
    (!chosen.mask || element.dataset.mask.split("\n").includes(chosen.mask)) &&
    (!chosen.show || element.dataset.state.split(" ").includes(chosen.show));

  // Hide the rows that were not chosen, and the charts and sections that hold no others.
  function apply() {
    const chosen = Object.fromEntries(fields.map((field) => [field.name, field.value]));
    let shown = 0;
    for (const section of document.querySelectorAll("section")) {
      const wanted = !chosen.operation || section.dataset.operation === chosen.operation;
      for (const row of section.querySelectorAll("[data-dtype]"))
        row.hidden = !(wanted && matches(row, chosen));
      for (const chart of section.querySelectorAll(".chart"))
        chart.hidden = !chart.querySelector(".row:not([hidden])");
      section.hidden = !section.querySelector(".chart:not([hidden])");
      shown += section.querySelectorAll(".row:not([hidden])").length;
    }
    const all = document.querySelectorAll(".row").length;
    status.textContent = shown ? `${shown} of ${all} shown` : "Nothing fits these filters.";
  }

  // The filters are in the address, so that a view can be linked to.
  function fromAddress() {
    const chosen = new URLSearchParams(location.hash.slice(1));
    for (const field of fields) {
      field.value = chosen.get(field.name) ?? "";
      if (field.selectedIndex < 0) field.value = "";
    }
    apply();
  }

  function toAddress() {
    const chosen = new URLSearchParams();
    for (const field of fields) if (field.value) chosen.set(field.name, field.value);
    const text = chosen.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    apply();
  }

  function place(event) {
    const start = (size, inner, at) => Math.max(4, Math.min(at + 14, inner - size - 4));
    const { clientWidth, clientHeight } = document.documentElement;
    tip.style.left = `${start(tip.offsetWidth, clientWidth, event.clientX)}px`;
    tip.style.top = `${start(tip.offsetHeight, clientHeight, event.clientY)}px`;
  }

  function point(event) {
    const bar = event.target.closest?.("[data-tip]");
    tip.hidden = !bar;
    if (!bar) return;
    tip.textContent = bar.dataset.tip;
    place(event);
  }

  form.addEventListener("change", toAddress);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(toAddress));
  window.addEventListener("hashchange", fromAddress);
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  fromAddress();
}
