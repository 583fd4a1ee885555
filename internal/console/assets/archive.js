import { call, seconds } from './api.js';
import { count, moment, size, time } from './format.js';
import { html, Problem, Table, useLoad } from './ui.js';

const at = (us) => (Number(us) ? moment(Number(us) / 1000) : '–');

const owner = (o) => `process ${o.process} on host ${o.host}${o.since ? `, since ${moment(o.since)}` : ''}${o.self ? ': this server' : ''}`;

// Archive shows how far the log archive is, and what can be restored from it.
export function Archive() {
  const { value: a, error } = useLoad(() => call('AdminService/ArchiveStatus'), 5);
  if (!a) return html`<${Problem} error=${error} />`;
  if (!a.enabled) return html`<${Problem} error=${error} /><p>The server has no log archive: start it with --archive URL.</p>`;
  const state = a.refused ? 'Refused: an operator has to decide. If another process owns the archive, the error names it.' : a.error ? 'Failing: the server tries again, and keeps the log meanwhile.' : 'Archiving.';
  return html`<${Problem} error=${error} />
    <section class="panel"><h2>Log archive <code>${a.target}</code></h2>
      <p>${state}</p>${a.error ? html`<p class="error">${a.error}</p>` : ''}
      <dl>
        <dt>Lag</dt><dd>${time(seconds(a.lag))}: every commit that was durable this long ago is in the archive</dd>
        <dt>Archived epoch</dt><dd>${a.archivedEpoch}</dd>
        <dt>Not archived</dt><dd>${size(a.pendingBytes)} read from the log, ${size(a.heldLogBytes)} of log kept</dd>
        <dt>Since the start</dt><dd>${count(a.files)} files of ${size(a.fileBytes)} with ${count(a.records)} records</dd>
        <dt>Owner</dt><dd>${a.owner ? owner(a.owner) : 'not known yet'}</dd>
        <dt>Lineage</dt><dd><code>${a.lineage}</code></dd>
        ${a.breakReason ? html`<dt>Begun anew</dt><dd>at epoch ${a.breakEpoch}: ${a.breakReason}. Only a full backup that has this epoch makes later states restorable.</dd>` : ''}
      </dl></section>
    <${Table} caption="Parts of the archive without a hole" rows=${a.intervals} columns=${[
      { title: 'From', value: (i) => at(i.oldestUs) }, { title: 'To', value: (i) => at(i.newestUs) },
      { title: 'First epoch', number: true, value: (i) => i.firstEpoch }, { title: 'Last epoch', number: true, value: (i) => i.lastEpoch }]} />`;
}
