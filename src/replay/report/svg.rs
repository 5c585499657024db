//! Small SVG charts without any asset: lines over a linear or logarithmic scale, and a grid of cells.

use std::fmt::Write as _;

use crate::replay::policy::POLICIES;

/// Colours of series, told apart in grey too.
const COLOURS: [&str; 13] = [
    "#0b6e4f", "#8d99ae", "#21a179", "#d62828", "#f77f00", "#fcbf49", "#9d4edd", "#577590", "#3a86ff",
    "#4cc9f0", "#6a4c93", "#b5838d", "#111111",
];

/// A policy has one colour in every picture; other lines go by their place.
pub fn colour(name: &str, place: usize) -> &'static str {
    let place = POLICIES.iter().position(|p| p.name == name).unwrap_or(place);
    COLOURS[place % COLOURS.len()]
}

/// One line.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

/// A chart of lines.
#[derive(Debug, Clone)]
pub struct Chart<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below it.
    pub x: &'a str,
    /// Beside it.
    pub y: &'a str,
    /// Logarithmic scales.
    pub log: (bool, bool),
    /// The lines.
    pub lines: Vec<Line>,
}

const W: f64 = 640.0;
const H: f64 = 300.0;
const LEFT: f64 = 62.0;
const BOTTOM: f64 = 40.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 26.0;

/// Escapes text for HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn new(values: impl Iterator<Item = f64>, log: bool, from: f64, to: f64) -> Self {
        let values: Vec<f64> = values.filter(|v| v.is_finite() && (!log || *v > 0.0)).collect();
        let high = values.iter().copied().fold(f64::MIN, f64::max);
        let low = if log { values.iter().copied().fold(f64::MAX, f64::min) } else { 0.0 };
        let (low, high) = if values.is_empty() { (1.0, 10.0) } else { (low, high) };
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, log, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        if !self.log {
            return (0..=4).map(|i| self.low + (self.high - self.low) * f64::from(i) / 4.0).collect();
        }
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let fine: Vec<f64> = (first..=last)
            .flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e)))
            .filter(|v| (self.low..=self.high).contains(v))
            .collect();
        match fine.len() {
            0..=8 => fine,
            _ => {
                (first..=last).map(|e| 10f64.powi(e)).filter(|v| (self.low..=self.high).contains(v)).collect()
            }
        }
    }
}

fn label(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => {
            format!("{:.3}", v / 1e6).trim_end_matches('0').trim_end_matches('.').to_owned() + "M"
        }
        v if v >= 1e3 => {
            format!("{:.1}", v / 1e3).trim_end_matches('0').trim_end_matches('.').to_owned() + "k"
        }
        v if v >= 10.0 || v == 0.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// Renders a chart.
pub fn chart(chart: &Chart<'_>) -> String {
    let points = || chart.lines.iter().flat_map(|l| l.points.iter());
    let x = Scale::new(points().map(|p| p.0), chart.log.0, LEFT, W - RIGHT);
    let y = Scale::new(points().map(|p| p.1), chart.log.1, H - BOTTOM, TOP);
    let mut s = format!(
        "<svg viewBox=\"0 0 {W} {H}\" role=\"img\"><text x=\"{LEFT}\" y=\"15\" class=\"t\">{}</text>",
        escape(chart.title)
    );
    for tick in x.ticks() {
        let at = x.at(tick);
        let _ = write!(
            s,
            "<path class=\"g\" d=\"M{at:.1} {TOP}V{}\"/><text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            H - BOTTOM,
            H - BOTTOM + 14.0,
            label(tick)
        );
    }
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = write!(
            s,
            "<path class=\"g\" d=\"M{LEFT} {at:.1}H{}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            W - RIGHT,
            LEFT - 5.0,
            at + 4.0,
            label(tick)
        );
    }
    let middle = (LEFT + W - RIGHT) / 2.0;
    let _ = write!(
        s,
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
         <text transform=\"translate(13 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        H - 6.0,
        escape(chart.x),
        H / 2.0,
        escape(chart.y)
    );
    for (i, line) in chart.lines.iter().enumerate() {
        let colour = colour(&line.name, i);
        let path: Vec<String> =
            line.points.iter().map(|p| format!("{:.1} {:.1}", x.at(p.0), y.at(p.1))).collect();
        let (at, side) = (TOP + 8.0 + 14.0 * i as f64, W - RIGHT + 12.0);
        let _ = write!(
            s,
            "<path fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" d=\"M{}\"/>\
             <path stroke=\"{colour}\" stroke-width=\"3\" d=\"M{side} {at}h14\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            path.join("L"),
            side + 19.0,
            at + 4.0,
            escape(&line.name)
        );
    }
    s + "</svg>"
}

/// A cell of a map: text and background.
#[derive(Debug, Clone)]
pub struct Cell {
    /// What it says; may hold several lines.
    pub text: Vec<String>,
    /// Colour.
    pub colour: &'static str,
}

/// Renders a grid: rows from top to bottom, each with a label; columns with labels below.
pub fn map(title: &str, columns: &[String], rows: &[(String, Vec<Cell>)]) -> String {
    let (cw, ch) = (130.0, 44.0);
    let (w, h) = (LEFT + 30.0 + cw * columns.len() as f64, TOP + 24.0 + ch * rows.len() as f64);
    let mut s = format!(
        "<svg viewBox=\"0 0 {w} {h}\" role=\"img\"><text x=\"0\" y=\"15\" class=\"t\">{}</text>",
        escape(title)
    );
    for (r, (name, cells)) in rows.iter().enumerate() {
        let top = TOP + ch * r as f64;
        let _ =
            write!(s, "<text x=\"{LEFT}\" y=\"{}\" text-anchor=\"end\">{}</text>", top + 25.0, escape(name));
        for (c, cell) in cells.iter().enumerate() {
            let left = LEFT + 8.0 + cw * c as f64;
            let _ = write!(
                s,
                "<rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" rx=\"4\" fill=\"{}\" fill-opacity=\".28\"/>",
                cw - 4.0,
                ch - 4.0,
                cell.colour
            );
            for (i, line) in cell.text.iter().enumerate() {
                let y = top + 17.0 + 15.0 * i as f64;
                let _ = write!(s, "<text x=\"{}\" y=\"{y}\">{}</text>", left + 6.0, escape(line));
            }
        }
    }
    for (c, name) in columns.iter().enumerate() {
        let x = LEFT + 8.0 + cw * (c as f64 + 0.5);
        let y = TOP + 16.0 + ch * rows.len() as f64;
        let _ = write!(s, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", escape(name));
    }
    s + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charts_stay_inside_and_escape() {
        let lines = vec![Line { name: "a<b".into(), points: vec![(1.0, 10.0), (2.0, f64::NAN), (9.0, 1e5)] }];
        let svg = chart(&Chart { title: "t & t", x: "x", y: "y", log: (false, true), lines });
        assert!(svg.contains("a&lt;b") && svg.contains("t &amp; t") && svg.ends_with("</svg>"));
        assert!(
            chart(&Chart { title: "", x: "", y: "", log: (true, true), lines: vec![] }).ends_with("</svg>")
        );
        assert_eq!(
            (label(92_104.0), label(1_100_000.0), label(0.5)),
            ("92.1k".into(), "1.1M".into(), "0.50".into())
        );
    }
}
