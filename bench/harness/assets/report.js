"use strict";
// Charts of scenarios with an axis; single points are bars in plain HTML. Each chart is drawn anew when its card changes
// width or the colours of the page change.
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = v => {
	for (const [unit, size] of [[" M", 1e6], [" k", 1e3]]) if (Math.abs(v) >= size) return +(v / size).toPrecision(3) + unit;
	return +v.toPrecision(3) + "";
};
const some = v => v !== null && v !== undefined;

// Along an axis points stand at equal distances, whatever their values: 1, 2, 4, 8 writers or 16 B to 64 KiB read best so. For
// growth both scales are logarithmic, so that a power is a straight line.
function draw(c, element) {
	const growth = c.kind === "growth";
	const xs = growth ? c.points : c.points.map((_, i) => i);
	const strokes = c.lines.map((_, i) => colour("--c" + i % 6));
	const [ink, grid] = [colour("--soft"), colour("--line")];
	const fits = c.lines.map((line, i) => ({...line, stroke: strokes[i]})).filter(line => line.Fit);
	const whiskers = plot => {
		const {ctx} = plot;
		ctx.save();
		ctx.lineWidth = 1.5 * devicePixelRatio;
		c.lines.forEach((line, k) => {
			if (!plot.series[k + 1].show) return;
			ctx.strokeStyle = strokes[k];
			line.Low.forEach((low, i) => {
				if (!some(low)) return;
				const x = Math.round(plot.valToPos(xs[i], "x", true));
				ctx.beginPath();
				ctx.moveTo(x, plot.valToPos(low, "y", true));
				ctx.lineTo(x, plot.valToPos(line.High[i], "y", true));
				ctx.stroke();
			});
		});
		ctx.restore();
	};
	const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif"};
	const narrow = element.clientWidth < 520;
	const label = i => narrow && c.labels[i].length > 9 ? c.labels[i].slice(0, 8) + "…" : c.labels[i];
	const lows = c.lines.flatMap(line => line.Low).filter(some), highs = c.lines.flatMap(line => line.High).filter(some);
	// 1, 2 and 5 of each power of ten.
	const steps = (low, high) => {
		const out = [];
		for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) for (const m of [1, 2, 5]) if (m * power >= low && m * power <= high) out.push(m * power);
		return out;
	};
	const pad = growth ? Math.pow(xs.at(-1) / xs[0], 0.06) : 0;
	return new uPlot({
		width: element.clientWidth, height: narrow ? 260 : 320,
		scales: {
			x: growth ? {time: false, distr: 3, log: 2, range: [xs[0] / pad, xs.at(-1) * pad]} : {time: false, range: [-0.35, xs.length - 0.65]},
			y: growth ? {distr: 3, range: [Math.min(...lows) / 1.6, Math.max(...highs) * 1.6]} : {range: [0, Math.max(...highs) * 1.1 || 1]},
		},
		series: [
			{label: c.axis, value: (_, v) => some(v) ? c.labels[xs.indexOf(v)] : ""},
			...c.lines.map((line, k) => ({
				label: line.Arm, stroke: strokes[k], width: 2, spanGaps: true, points: {show: true, size: 7, fill: strokes[k]},
				value: (_, v) => some(v) ? short(v) : "",
			})),
			...fits.map(line => ({label: line.Arm + ", fitted", stroke: line.stroke, width: 1.5, dash: [6, 5], points: {show: false}, value: (_, v) => some(v) ? short(v) : ""})),
		],
		axes: [
			{...axis, label: c.axis, splits: () => xs, values: (_, ticks) => ticks.map(v => label(xs.indexOf(v))), filter: (_, ticks) => ticks, space: 0},
			{...axis, label: c.shows, size: 62, ...(growth ? {splits: (_, __, low, high) => steps(low, high), filter: (_, ticks) => ticks} : {}), values: (_, ticks) => ticks.map(v => some(v) ? short(v) : "")},
		],
		cursor: {points: {show: false}, drag: {x: false, y: false}},
		hooks: {draw: [whiskers]},
	}, [xs, ...c.lines.map(line => line.Median), ...fits.map(line => line.Fit)], element);
}

const drawn = new Map();
function redraw(element) {
	if (element.clientWidth === 0) return;
	drawn.get(element)?.destroy();
	drawn.set(element, draw(charts[element.dataset.chart], element));
}
const widths = new Map();
const observer = new ResizeObserver(entries => entries.forEach(({target}) => {
	if (widths.get(target) === target.clientWidth) return;
	widths.set(target, target.clientWidth);
	redraw(target);
}));
document.querySelectorAll("[data-chart]").forEach(element => observer.observe(element));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((_, element) => redraw(element)));
