//! The self-contained page: no script, no font, no other file.

use std::fmt::Write as _;

use serde_json::Value;

use super::svg::{Cell, Chart, Line, chart, colour, escape, map};
use super::{COLUMNS, Summary};
use crate::replay::figures::Figures;
use crate::replay::sweep::Point;

const HEAD: &str = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
<meta name=\"viewport\" content=\"width=device-width\"><title>kvc-router replay</title><style>\
body{font:15px/1.45 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em;color:#1b1b1b}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}\
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}\
td,th{padding:3px 9px;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
svg{width:100%;max-width:640px}svg text{font:11px system-ui,sans-serif;fill:#333}svg .t{font-size:13px;font-weight:600}\
svg .g{stroke:#e4e4e4}.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}\
pre{font-size:12px;overflow:auto;background:#f6f6f6;padding:1em}</style>";

const PARTIAL: &str =
    "<p><b>Partial:</b> the run was stopped before its end; the figures are of what was finished.";

fn get(f: &Figures, key: &str) -> f64 {
    f.get(key).copied().unwrap_or(0.0)
}

/// The page of one setting. `partial`: the run was stopped before its end.
pub fn page(trace: &str, setting: &Value, results: &[Summary], partial: bool) -> String {
    let note = if partial { PARTIAL } else { "" };
    let mut s = format!("{HEAD}<h1>Replay of {}</h1>{note}{}", escape(trace), table(results));
    let ttft = Chart {
        title: "TTFT by policy",
        x: "percent of turns",
        y: "ms, logarithmic",
        log: (false, true),
        lines: results.iter().map(distribution).collect(),
    };
    let _ = write!(
        s,
        "<h2>How long users wait</h2><div class=\"row\">{}{}</div>",
        chart(&ttft),
        slowest(results)
    );
    s += "<h2>Turns on each worker over time (first seed)</h2><div class=\"row\">";
    for r in results {
        s += &load(r);
    }
    let _ = write!(s, "</div><h2>Setting</h2><pre>{}</pre></html>", escape(&format!("{setting:#}")));
    s
}

fn table(results: &[Summary]) -> String {
    let mut s = String::from("<table><tr><th>policy");
    for (heading, ..) in COLUMNS {
        let _ = write!(s, "<th>{}", escape(heading));
    }
    for r in results {
        let _ = write!(s, "<tr><td>{}", escape(&r.policy));
        for (_, key, decimals) in COLUMNS {
            let _ =
                write!(s, "<td title=\"± {:.decimals$}\">{:.decimals$}", get(&r.sd, key), get(&r.mean, key));
        }
    }
    s + "</table>"
}

fn distribution(r: &Summary) -> Line {
    let points = r.curve.iter().enumerate().map(|(i, ms)| (i as f64, ms.max(1.0))).collect();
    Line { name: r.policy.clone(), points }
}

/// What the slowest 1 % of each policy were.
fn slowest(results: &[Summary]) -> String {
    let mut s = String::from("<table><tr><th>policy<th>the slowest 1 % were");
    for r in results {
        let mut parts: Vec<(f64, &str)> =
            r.mean.iter().filter_map(|(k, v)| Some((*v, k.strip_prefix("slowest_pct.")?))).collect();
        parts.sort_by(|a, b| b.0.total_cmp(&a.0));
        let text: Vec<String> = parts.iter().map(|(share, what)| format!("{what} {share:.0} %")).collect();
        let _ = write!(s, "<tr><td>{}<td>{}", escape(&r.policy), escape(&text.join(" · ")));
    }
    s + "</table>"
}

fn load(r: &Summary) -> String {
    let workers = r.load.first().map_or(0, Vec::len);
    let line = |d: usize| Line {
        name: format!("worker {d}"),
        points: r.load.iter().enumerate().map(|(i, w)| (i as f64, f64::from(w[d]))).collect(),
    };
    let lines = (0..workers).map(line).collect();
    chart(&Chart { title: &r.policy, x: "minute", y: "turns running", log: (false, false), lines })
}

/// The page of a sweep: the knee and the map of who wins.
pub fn sweep(trace: &str, points: &[Point], partial: bool) -> String {
    let note = if partial { PARTIAL } else { "" };
    let mut s = format!("{HEAD}<h1>Sweep of {}</h1>{note}", escape(trace));
    let mut sessions: Vec<u32> = points.iter().map(|p| p.sessions).collect();
    sessions.sort_unstable();
    sessions.dedup();
    for n in &sessions {
        let _ = write!(s, "<h2>{n} live sessions</h2><div class=\"row\">");
        for (title, key, log) in [
            ("The knee: Direct share of eligible turns, %", "direct_pct", false),
            ("TTFT p99, ms", "ttft_ms.p99", true),
            ("TTFT p50, ms", "ttft_ms.p50", true),
            ("ITL p99.9, ms", "itl_ms.p999", true),
        ] {
            let lines = knee(points, *n, key);
            s += &chart(&Chart { title, x: "K_d in tokens", y: "", log: (true, log), lines });
        }
        s += "</div>";
    }
    s += "<h2>Who wins</h2><div class=\"row\">";
    for (title, key) in [
        ("lowest TTFT p99", "ttft_ms.p99"),
        ("lowest TTFT p50", "ttft_ms.p50"),
        ("lowest ITL p99.9", "itl_ms.p999"),
    ] {
        s += &winners(points, &sessions, title, key);
    }
    s + "</div></html>"
}

fn knee(points: &[Point], sessions: u32, key: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for point in points.iter().filter(|p| p.sessions == sessions) {
        for r in &point.results {
            let at = (point.kv_tokens as f64, get(&r.mean, key));
            match lines.iter_mut().find(|l| l.name == r.policy) {
                Some(line) => line.points.push(at),
                None => lines.push(Line { name: r.policy.clone(), points: vec![at] }),
            }
        }
    }
    lines
}

fn winners(points: &[Point], sessions: &[u32], title: &str, key: &str) -> String {
    let mut kv: Vec<u64> = points.iter().map(|p| p.kv_tokens).collect();
    kv.sort_unstable();
    kv.dedup();
    let cell = |n: u32, k: u64| {
        let point = points.iter().find(|p| p.sessions == n && p.kv_tokens == k);
        let best = point
            .and_then(|p| p.results.iter().min_by(|a, b| get(&a.mean, key).total_cmp(&get(&b.mean, key))));
        best.map_or(Cell { text: vec![], colour: "#ffffff" }, |b| {
            // One seed has no spread.
            let spread =
                Some(get(&b.sd, key)).filter(|sd| *sd > 0.0).map_or(String::new(), |sd| format!(" ±{sd:.0}"));
            let value = format!("{:.0}{spread} ms", get(&b.mean, key));
            Cell { text: vec![b.policy.clone(), value], colour: colour(&b.policy, 0) }
        })
    };
    let rows: Vec<(String, Vec<Cell>)> = sessions
        .iter()
        .rev()
        .map(|n| (format!("{n} live"), kv.iter().map(|k| cell(*n, *k)).collect()))
        .collect();
    let columns: Vec<String> = kv.iter().map(|k| format!("K_d {k}")).collect();
    map(title, &columns, &rows)
}
