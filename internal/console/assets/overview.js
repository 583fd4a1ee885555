import { samples } from './api.js';
import { count, percent, size, time } from './format.js';
import { Chart, html, Problem, useLoad } from './ui.js';

// Overview shows the last hour.
export function Overview({ status }) {
  const { value, error } = useLoad(samples, 5);
  const of = (name, show) => ({ name: show, values: (value || []).map((s) => (s[name] < 0 ? null : s[name])) });
  const used = (name, show) => ({ name: show, values: (value || []).map((s) => s[name] || null) });
  return html`<${Problem} error=${error} />
    <p class="dim">The last hour, a sample every 5 seconds${value ? `: ${value.length} so far` : ''}. Latencies are upper bounds of powers of two.</p>
    <div class="grid">
      <${Chart} title="Requests a second" rows=${[of('reads', 'reads'), of('writes', 'writes')]} show=${count} />
      <${Chart} title="Latency of reads" rows=${[used('read_p50', 'median'), used('read_p99', '99 %')]} show=${time} />
      <${Chart} title="Latency of writes" rows=${[used('write_p50', 'median'), used('write_p99', '99 %')]} show=${time} />
      <${Chart} title="Requests that did not succeed, a second" rows=${[of('failed', 'all codes but OK')]} show=${count} />
      <${Chart} title="Log, bytes a second" rows=${[of('log_bytes', 'written')]} show=${size} />
      <${Chart} title="Commits and syncs a second" rows=${[of('commits', 'commits'), of('syncs', 'syncs')]} show=${count} />
      <${Chart} title="Pages found in the cache" rows=${[of('hit_ratio', 'of all reads of pages')]} show=${percent} max=${1} />
      <${Chart} title="Time that writers waited for memory, a second" rows=${[of('stalled', 'all writers together')]} show=${time} />
      <${Chart} title="Memory of cache and memtables" rows=${[of('memory', 'in use')]} show=${size} />
      <${Chart} title="Data file" rows=${[of('live_bytes', 'live pages')]} show=${size} />
      <${Chart} title="Connections and transactions" rows=${[of('connections', 'connections'), of('transactions', 'transactions')]} show=${count} />
      <${Chart} title="Watches and snapshots" rows=${[of('watches', 'watches'), of('snapshots', 'snapshots')]} show=${count} />
    </div>
    ${status ? html`<p>Epoch ${status.epochs.visible} is visible, ${status.epochs.durable} durable; the past is readable from ${status.epochs.minVisible} on.
      Data directory <code>${status.sizes.dataDir}</code>, ${size(status.sizes.diskFreeBytes)} free.</p>` : ''}`;
}
