import { call, encodeKey, seconds, showBytes } from './api.js';
import { count, percent, size, time } from './format.js';
import { html, Problem, Table, useLoad } from './ui.js';
import { useState } from './vendor/hooks.js';

// Space shows what the data file is made of and, on request, where space went by prefix.
export function Space() {
  const total = useLoad(() => call('AdminService/Space'), 30);
  const [by, setBy] = useState({ value: null, error: null, busy: false });
  const measure = async (e) => {
    e.preventDefault();
    const f = new FormData(e.target);
    setBy({ ...by, busy: true });
    try {
      const message = { byPrefix: true, depth: Number(f.get('depth')), delimiter: encodeKey(f.get('delimiter')) };
      setBy({ value: await call('AdminService/Space', message), error: null, busy: false });
    } catch (error) { setBy({ value: null, error, busy: false }); }
  };
  const s = total.value;
  return html`<${Problem} error=${total.error} />
    ${s ? html`<div class="grid"><section class="panel"><h2>Data file at epoch ${s.epoch}</h2>
      <p>${size(s.fileBytes)}: ${size(s.liveBytes)} live, ${size(s.pendingBytes)} freed and still read, ${size(s.freeBytes)} free.</p>
      <p>${count(s.keys)} keys with ${size(s.entryBytes)} of entries; ${count(s.values)} large values of ${size(s.valueBytes)}; a tree of height ${s.treeHeight}.</p></section></div>` : ''}
    <h2>By prefix</h2>
    <form class="bar" onSubmit=${measure}>
      <label>Parts of a key <input name="depth" type="number" min="1" max="16" value="1" /></label>
      <label>Delimiter <input name="delimiter" value="/" size="4" /></label>
      <button disabled=${by.busy}>${by.busy ? 'Reading …' : 'Read the tree'}</button>
      <span class="dim">It reads every leaf: large stores take longer than the 20 seconds that the console waits; then use kvctl space.</span></form>
    <${Problem} error=${by.error} />
    ${by.value ? html`<p class="dim">${count(by.value.versions)} versions in leaves that are ${percent(by.value.leafFill)} full, read in ${time(seconds(by.value.duration))}.</p>
      <${Table} caption="Prefixes, the largest first" rows=${by.value.prefixes} columns=${[
        { title: 'Prefix', value: (p) => html`<span class="bytes">${showBytes(p.prefix)}</span>` },
        { title: 'Keys', number: true, value: (p) => count(p.keys) }, { title: 'Bytes', number: true, value: (p) => size(p.bytes) }]} />` : ''}`;
}
