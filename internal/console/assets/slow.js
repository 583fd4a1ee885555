import { call, seconds, showBytes } from './api.js';
import { count, moment, size, time } from './format.js';
import { html, Problem, Table, useLoad } from './ui.js';

// Slow lists the slowest requests and where their time went.
export function Slow() {
  const { value, error } = useLoad(() => call('AdminService/SlowRequests', { limit: 100 }), 5);
  const part = (title, field) => ({ title, number: true, value: (r) => time(seconds(r[field])) });
  return html`<${Problem} error=${error} />
    ${value ? html`<p class="dim">${count(value.total)} requests took longer than ${time(seconds(value.threshold))} (--slow-request-threshold) since the start; the slowest of the last hour are kept.</p>` : ''}
    <${Table} caption="Slowest requests" rows=${value && value.requests} columns=${[
      { title: 'Method', value: (r) => r.method }, { title: 'Ended', value: (r) => moment(r.ended) }, part('Took', 'took'),
      part('Queue', 'queue'), part('Latch', 'latch'), part('Memory', 'memory'), part('Sync', 'sync'), part('Pages', 'pages'), part('Client', 'client'),
      { title: 'Pages read', number: true, value: (r) => count(r.pagesRead) }, { title: 'Size', number: true, value: (r) => size(r.requestBytes) },
      { title: 'Result', value: (r) => r.code }, { title: 'Client', value: (r) => r.peer }, { title: 'Key', value: (r) => html`<span class="bytes">${showBytes(r.keyPrefix)}</span>` },
      { title: 'Trace', value: (r) => (r.traceId ? html`<code>${r.traceId}</code>` : '–') }]} />`;
}
