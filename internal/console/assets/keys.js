import { call, encodeKey, scan, showBytes } from './api.js';
import { moment, size } from './format.js';
import { html, Problem, Table } from './ui.js';
import { useEffect, useRef, useState } from './vendor/hooks.js';

const listed = 100;
const shownBytes = 64 << 10;

function Value({ base64 }) {
  const text = showBytes(base64);
  return html`<pre tabindex="0" aria-label="Value">${text.length > shownBytes ? text.slice(0, shownBytes) + '…' : text || '(empty)'}</pre>`;
}

// Keys browses keys, now or at a moment of the retained past, with the history of one.
export function Keys() {
  const [prefix, setPrefix] = useState('');
  const [ago, setAgo] = useState(0); // seconds
  const [list, setList] = useState({ entries: null, error: null, epoch: '' });
  const [chosen, choose] = useState(null);
  const round = useRef(0);
  const load = async () => {
    const mine = ++round.current; // an answer that a later one overtook is dropped
    const message = { range: { prefix: encodeKey(prefix) }, limit: String(listed), keysOnly: true };
    if (!prefix) delete message.range;
    if (ago) message.snapshotTimeUs = String(Math.round((Date.now() - 1000 * ago) * 1000));
    try {
      const { entries, epoch } = await scan(message);
      if (mine === round.current) setList({ entries, error: null, epoch });
    } catch (error) { if (mine === round.current) setList({ entries: [], error, epoch: '' }); }
  };
  useEffect(() => { const t = setTimeout(load, 200); return () => clearTimeout(t); }, [prefix, ago]);
  const open = async (key) => {
    try {
      const at = list.epoch && ago ? { snapshotEpoch: list.epoch } : {};
      const [value, history] = await Promise.all([call('KVService/Get', { key, ...at }), call('FeedService/History', { key, limit: 50 }).catch((error) => ({ versions: [], error }))]);
      choose({ key, value, history, error: null });
    } catch (error) { choose({ key, error }); }
  };
  return html`<form class="bar" onSubmit=${(e) => { e.preventDefault(); load(); }}>
      <label>Keys that begin with <input value=${prefix} onInput=${(e) => setPrefix(e.target.value)} spellcheck="false" /></label>
      <label>Time: ${ago ? `${ago} s ago` : 'now'} <input type="range" min="0" max="3600" step="5" value=${ago} onInput=${(e) => setAgo(Number(e.target.value))} /></label>
      <button>Read again</button></form>
    <${Problem} error=${list.error} />
    <div class="columns"><div>
      <${Table} caption=${`Keys${list.epoch ? ' at epoch ' + list.epoch : ''}${list.entries && list.entries.length === listed ? `, the first ${listed}` : ''}`} rows=${list.entries} columns=${[
        { title: 'Key', value: (r) => html`<button class="link" onClick=${() => open(r.key)}>${showBytes(r.key)}</button>` },
        { title: 'Epoch', number: true, value: (r) => r.epoch }, { title: 'Expires', value: (r) => (Number(r.expiresAtMs) ? moment(Number(r.expiresAtMs)) : '–') }]} />
    </div><div aria-live="polite">
      ${chosen ? html`<h2 class="bytes">${showBytes(chosen.key)}</h2><${Problem} error=${chosen.error} />
        ${chosen.value ? (chosen.value.found ? html`<p class="dim">${size(atob(chosen.value.value).length)}, written at epoch ${chosen.value.epoch}</p><${Value} base64=${chosen.value.value} />` : html`<p>The key did not exist then.</p>`) : ''}
        ${chosen.history ? html`<${Problem} error=${chosen.history.error} /><${Table} caption="History, as far as it is kept" rows=${chosen.history.versions} columns=${[
          { title: 'Epoch', number: true, value: (v) => v.epoch }, { title: 'Committed', value: (v) => (Number(v.timeUs) ? moment(Number(v.timeUs) / 1000) : '–') },
          { title: 'Value', value: (v) => (v.kind === 'EVENT_KIND_DELETE' ? html`<em>deleted</em>` : html`<span class="bytes">${showBytes(v.value).slice(0, 200)}</span>`) }]} />` : ''}` : html`<p class="dim">Choose a key to see its value and history.</p>`}
    </div></div>`;
}
