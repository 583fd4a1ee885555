import { call } from './api.js';
import { html, Problem, Table, useLoad } from './ui.js';

// Configuration lists every option, its value, and where the value comes from.
export function Configuration() {
  const { value, error } = useLoad(() => call('AdminService/GetConfig'), 30);
  return html`<${Problem} error=${error} />
    <${Table} caption="Options" rows=${value && value.options} columns=${[
      { title: 'Option', value: (o) => html`<code>--${o.name}</code>` }, { title: 'Value', value: (o) => html`<code>${o.value}</code>` },
      { title: 'From', value: (o) => o.origin }]} />`;
}
