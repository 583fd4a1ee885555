// Numbers for people.

export function count(n) {
  n = Number(n);
  if (!isFinite(n)) return '–';
  if (n >= 1e9) return (n / 1e9).toFixed(1) + ' G';
  if (n >= 1e6) return (n / 1e6).toFixed(1) + ' M';
  if (n >= 1e4) return (n / 1e3).toFixed(1) + ' k';
  return n >= 100 || Number.isInteger(n) ? n.toFixed(0) : n.toFixed(1);
}

export function size(n) {
  n = Number(n);
  if (!isFinite(n) || n < 0) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
  return (unit && n < 100 ? n.toFixed(1) : n.toFixed(0)) + ' ' + units[unit];
}

export function time(s) {
  if (!s) return '–';
  if (s < 1e-3) return (s * 1e6).toFixed(0) + ' µs';
  if (s < 1) return (s * 1e3).toFixed(s < 0.01 ? 1 : 0) + ' ms';
  if (s < 120) return s.toFixed(s < 10 ? 1 : 0) + ' s';
  if (s < 7200) return (s / 60).toFixed(0) + ' min';
  if (s < 172800) return (s / 3600).toFixed(0) + ' h';
  return (s / 86400).toFixed(0) + ' days';
}

export const percent = (n) => (n < 0 ? '–' : (100 * n).toFixed(1) + ' %');
export const moment = (t) => new Date(t).toLocaleString();
