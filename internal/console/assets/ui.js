// Parts of pages.

import { h } from './vendor/preact.js';
import { useEffect, useState } from './vendor/hooks.js';
import { call } from './api.js';
import htm from './vendor/htm.js';

export const html = htm.bind(h);

// useLoad loads now and every few seconds, while the page is visible. It has the newest result, also after a later error.
export function useLoad(load, every = 5, dependencies = []) {
  const [state, set] = useState({ value: null, error: null, loading: true });
  useEffect(() => {
    let ended = false;
    let timer = 0;
    const run = async () => {
      if (!document.hidden) {
        try {
          const value = await load();
          if (!ended) set({ value, error: null, loading: false });
        } catch (error) {
          if (!ended) set((s) => ({ value: s.value, error, loading: false }));
        }
      }
      if (!ended && every) timer = setTimeout(run, 1000 * every);
    };
    run();
    return () => { ended = true; clearTimeout(timer); };
  }, dependencies);
  return state;
}

export function Problem({ error }) {
  if (!error) return null;
  const reason = error.reason || error.code;
  return html`<p class="error" role="alert">${error.message}${reason ? ` (${reason})` : ''}</p>`;
}

// Confirmed is a button that asks, calls a method of the API, and then calls done. What went wrong is told beside it.
export function Confirmed({ text, what, ask, method, message, done }) {
  const [error, setError] = useState(null);
  const act = async () => {
    if (!confirm(`${text} ${what}? ${ask}`)) return;
    try { await call(method, message); setError(null); } catch (problem) { setError(problem); }
    done();
  };
  return html`<button onClick=${act} aria-label=${`${text} ${what}`}>${text}</button><${Problem} error=${error} />`;
}

// Table has columns {title, value(row), number}, and says so when there are no rows.
export function Table({ caption, columns, rows, empty = 'none' }) {
  if (!rows || rows.length === 0) return html`<p class="dim">${caption}: ${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table>
    <caption>${caption}</caption>
    <thead><tr>${columns.map((c) => html`<th scope="col" class=${c.number ? 'number' : ''}>${c.title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.id || row.name}>${columns.map((c) => html`<td class=${c.number ? 'number' : ''}>${c.value(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

// Chart draws one or two rows of numbers of the same unit over the last hour. What it draws is also told in text.
export function Chart({ title, rows, show, max }) {
  const width = 300, height = 80;
  const all = rows.flatMap((r) => r.values.filter((v) => v !== null));
  const top = max || Math.max(1e-9, ...all) * 1.05;
  const line = (values) => values.map((v, i) => (v === null ? '' :
    `${((i + 0.5) / Math.max(values.length, 1) * width).toFixed(1)},${(height - Math.min(v / top, 1) * height).toFixed(1)}`)).filter(Boolean).join(' ');
  const now = (r) => { const v = r.values.filter((x) => x !== null); return v.length ? show(v[v.length - 1]) : '–'; };
  const peak = (r) => { const v = r.values.filter((x) => x !== null); return v.length ? show(Math.max(...v)) : '–'; };
  return html`<section class="panel"><h2>${title}</h2>
    <svg class="chart" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" aria-hidden="true">
      <line x1="0" y1=${height} x2=${width} y2=${height}/><line x1="0" y1="0.5" x2=${width} y2="0.5"/>
      ${rows.map((r, i) => html`<polyline class=${i ? 'second' : 'first'} points=${line(r.values)}/>`)}
    </svg>
    <div class="legend">${rows.map((r, i) => html`<span class=${i ? 'second' : 'first'}>${r.name}: ${now(r)} (peak ${peak(r)})</span>`)}</div>
  </section>`;
}
