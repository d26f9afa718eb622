"""The report's style sheet, for light and dark mode and for wide and narrow screens."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fcfbf9; --card: #ffffff; --ink: #1c1f23; --soft: #5c636d; --faint: #8b929c; --rule: #e6e3dd;
  --after: #0d7a6c; --before: #a8a296; --train: #c07f2c; --good: #1d8a4f; --bad: #c2413b; --wash: #eef6f4;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, Charter, "Source Serif 4", Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", "JetBrains Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14161a; --card: #1b1e23; --ink: #e9e7e2; --soft: #a3a9b2; --faint: #757c87; --rule: #2c3037;
    --after: #4fc4b0; --before: #77736b; --train: #d9a25a; --good: #5cc48b; --bad: #ec7a74; --wash: #17292a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 var(--sans); font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1040px; margin: 0 auto; padding: 56px 28px 80px; }
h1, h2 { font-family: var(--serif); font-weight: 600; letter-spacing: -0.012em; line-height: 1.2; margin: 0; }
h1 { font-size: clamp(28px, 4.4vw, 42px); overflow-wrap: anywhere; }
h2 { font-size: 25px; margin: 64px 0 6px; }
p { margin: 0 0 12px; }
.eyebrow { color: var(--faint); font-size: 13px; letter-spacing: 0.06em; margin-bottom: 8px; }
.lead { color: var(--soft); max-width: 68ch; margin-bottom: 20px; }
.verdict { font-family: var(--serif); font-size: 21px; line-height: 1.45; max-width: 62ch; margin: 14px 0 0; }
.notice {
  margin: 22px 0 0; padding: 11px 16px; border-left: 3px solid var(--train); background: var(--card);
  border-radius: 0 8px 8px 0; font-size: 15px;
}
.badge {
  display: inline-block; padding: 1px 10px; border-radius: 99px; border: 1px solid currentColor;
  font-size: 12px; letter-spacing: 0.03em; margin-left: 8px; color: var(--soft);
}
.badge.finished { color: var(--good); } .badge.failed { color: var(--bad); }
.badge.interrupted, .badge.running { color: var(--train); }

.hero {
  display: grid; grid-template-columns: auto auto 1fr; gap: 10px 44px; align-items: center;
  margin: 32px 0 0; padding: 26px 30px; background: var(--card); border: 1px solid var(--rule); border-radius: 14px;
}
.figure .name { color: var(--soft); font-size: 14px; }
.figure .value { font: 600 clamp(38px, 6vw, 58px)/1.08 var(--serif); letter-spacing: -0.02em; }
.figure .range { color: var(--faint); font-size: 13.5px; }
.figure.after .value { color: var(--after); }
.figure.before .value { color: var(--soft); }
.scale { width: 100%; min-width: 200px; display: block; }
.scale .track { fill: var(--rule); }
.scale .band.before { fill: var(--before); opacity: 0.45; } .scale .band.after { fill: var(--after); opacity: 0.35; }
.scale .pin.before { fill: var(--before); } .scale .pin.after { fill: var(--after); }
.scale text { fill: var(--faint); font: 11px var(--sans); }

.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 16px 28px; margin: 26px 0 0; }
.facts div { border-top: 1px solid var(--rule); padding-top: 8px; }
.facts dt { color: var(--faint); font-size: 13px; } .facts dd { margin: 0; font-size: 15px; overflow-wrap: anywhere; }

figure { margin: 0; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px; margin-bottom: 6px; }
figcaption b { font-weight: 600; font-size: 15px; }
figcaption span { color: var(--faint); font-size: 13px; }
.panel { background: var(--card); border: 1px solid var(--rule); border-radius: 14px; padding: 18px 20px 10px; }
.panel.wide { padding: 22px 26px 14px; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 16px; margin-top: 16px; }
.small figcaption { display: block; } .small figcaption span { display: block; }
.legend { margin-left: auto; display: flex; gap: 18px; color: var(--soft); font-size: 13px; }
.legend.above { margin: 0 0 16px; }
.legend i { display: inline-block; width: 16px; height: 3px; border-radius: 2px; margin: 0 7px 3px 0; }
.legend i.main { background: var(--after); } .legend i.train { background: var(--train); }
.chart { width: 100%; height: auto; display: block; overflow: visible; }
.grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--faint); font: 11px var(--sans); }
.line { fill: none; stroke: var(--after); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.plain { stroke: var(--soft); stroke-width: 1.7; }
.line.train { stroke: var(--train); stroke-width: 1.6; }
.dot { fill: var(--card); stroke: var(--after); stroke-width: 2; } .dot.train { stroke: var(--train); }
.dot.plain { stroke: var(--soft); }
.interval { stroke: var(--after); stroke-width: 7; opacity: 0.16; stroke-linecap: round; }
.point rect { fill: transparent; }
.point .cursor, .point .mark, .point .tip { opacity: 0; pointer-events: none; }
.point:hover .cursor, .point:hover .mark, .point:hover .tip { opacity: 1; }
.cursor { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 2 3; }
.mark { fill: var(--after); } .mark.train { fill: var(--train); } .mark.plain { fill: var(--soft); }
.tip {
  fill: var(--ink); font: 600 11.5px var(--sans);
  paint-order: stroke; stroke: var(--card); stroke-width: 5px; stroke-linejoin: round;
}
.empty { color: var(--faint); }

.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 15px; }
th { text-align: left; color: var(--faint); font-weight: 500; font-size: 13px; padding: 0 14px 8px 0; }
td { border-top: 1px solid var(--rule); padding: 10px 14px 10px 0; vertical-align: middle; }
td.id { color: var(--faint); width: 1%; } td.num, th.num { text-align: right; white-space: nowrap; padding-right: 0; }
td.bars { width: 34%; min-width: 200px; }
.bar { display: flex; align-items: center; gap: 10px; height: 15px; font-size: 12.5px; color: var(--soft); }
.bar .track { flex: 1; height: 6px; border-radius: 3px; background: var(--rule); overflow: hidden; }
.bar .track i { display: block; height: 100%; border-radius: 3px; background: var(--before); }
.bar.after .track i { background: var(--after); } .bar.after { color: var(--ink); }
.bar.train .track i { background: var(--train); }
.bar .label { width: 82px; text-align: right; white-space: nowrap; }
.up { color: var(--good); } .down { color: var(--bad); } .same { color: var(--faint); }

.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 18px; }
.pair { background: var(--card); border: 1px solid var(--rule); border-radius: 14px; padding: 16px; }
.pair p { font-size: 15px; margin: 0 0 10px; }
.pair p span { color: var(--faint); font-size: 13px; white-space: nowrap; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
/* The box is higher than the video, so that the player's controls lie beneath the caption and not over it. */
.frame { position: relative; padding-bottom: calc(var(--height) + 64px); }
.frame video {
  position: absolute; inset: 0; width: 100%; height: 100%; object-fit: contain; object-position: top;
  border-radius: 8px; background: #16181d;
}
.side span { display: flex; justify-content: space-between; font-size: 13px; color: var(--soft); margin-bottom: 5px; }
.side .empty { font-size: 13px; padding: 28% 8px; text-align: center; border: 1px dashed var(--rule); }

.samples { display: grid; gap: 16px; }
.sample {
  display: flex; gap: 22px; padding: 18px 20px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 14px;
}
.sample .images { display: flex; flex-direction: column; gap: 8px; flex: none; width: 132px; }
.sample img { width: 100%; border-radius: 8px; image-rendering: auto; }
.sample .turns { flex: 1; min-width: 0; }
.sample .prompt { font-size: 15px; margin: 0 0 4px; white-space: pre-wrap; overflow-wrap: anywhere; }
.sample .prompt { max-height: 220px; overflow-y: auto; }
.sample .solution { color: var(--soft); font-size: 13.5px; margin: 0 0 10px; overflow-wrap: anywhere; }
.sample .sides.one { grid-template-columns: 1fr; }
.sample .side { min-width: 0; }
.sample .response {
  margin: 0; padding: 9px 12px; max-height: 260px; overflow: auto; background: var(--paper); white-space: pre-wrap;
  overflow-wrap: anywhere; min-height: 41px;
}
.sample .note { color: var(--faint); font-size: 13px; margin: 4px 0 0; }
.sample .side .empty { padding: 9px 12px; border-radius: 9px; text-align: left; }
details .samples { margin-top: 14px; }

details { border-top: 1px solid var(--rule); padding: 12px 0; margin-top: 14px; }
summary { cursor: pointer; color: var(--soft); }
pre, code { font-family: var(--mono); font-size: 13.5px; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 9px; padding: 14px; }
.commands { display: grid; grid-template-columns: max-content 1fr; gap: 10px 24px; align-items: baseline; margin: 0; }
.commands dt { color: var(--soft); } .commands dd { margin: 0; min-width: 0; }
.commands code {
  display: block; overflow-x: auto; background: var(--wash); border-radius: 7px; padding: 6px 12px; white-space: pre;
}
footer { margin-top: 64px; color: var(--faint); font-size: 13px; border-top: 1px solid var(--rule); padding-top: 14px; }
.on-narrow { display: none; }
@media (max-width: 720px) {
  .on-wide { display: none; } .on-narrow { display: block; } .panel, .panel.wide { padding: 16px 14px 8px; }
  main { padding: 32px 16px 56px; }
  .hero { grid-template-columns: 1fr 1fr; padding: 20px; gap: 16px; } .hero .scale { grid-column: 1 / -1; }
  .pairs { grid-template-columns: 1fr; } .facts { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); }
  .scroll { overflow: visible; } thead { display: none; } table, tbody { display: block; }
  tr { display: grid; grid-template-columns: auto 1fr auto; gap: 6px 12px; padding: 12px 0; }
  tr { border-top: 1px solid var(--rule); } td { border: 0; padding: 0; }
  td.id { width: auto; } td.bars { grid-column: 1 / -1; grid-row: 2; width: auto; min-width: 0; }
  td.num[data-name]::after { content: " " attr(data-name); color: var(--faint); font-size: 12.5px; }
  .sample { flex-direction: column; gap: 12px; padding: 16px 14px; }
  .sample .images { flex-direction: row; flex-wrap: wrap; width: auto; } .sample img { width: 96px; }
  .sample .sides { grid-template-columns: 1fr; }
  .commands { grid-template-columns: 1fr; gap: 4px; } .commands dd { margin-bottom: 10px; }
}
@media print { .point { display: none; } body { background: #fff; } .panel, .pair, .sample { break-inside: avoid; } }
"""
