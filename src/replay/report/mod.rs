//! What a replay tells: a table, JSON, and a page of pictures.

pub mod html;
mod svg;

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::figures::{Figures, spread};
use super::settings::Setting;

/// One policy on one seed.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The policy.
    pub policy: String,
    /// Its figures.
    pub figures: Figures,
    /// Wall time of the simulation in s.
    pub wall_s: f64,
    /// TTFT in ms at 0, 1, … 100 % of the turns.
    pub curve: Vec<f64>,
    /// Turns running per D at the end of each minute.
    pub load: Vec<Vec<u32>>,
}

/// One policy over all seeds.
#[derive(Debug, Clone)]
pub struct Summary {
    /// The policy.
    pub policy: String,
    /// Means.
    pub mean: Figures,
    /// Standard deviations.
    pub sd: Figures,
    /// Seeds.
    pub seeds: usize,
    /// Wall time in s.
    pub wall_s: f64,
    /// Mean TTFT curve.
    pub curve: Vec<f64>,
    /// Load of the first seed.
    pub load: Vec<Vec<u32>>,
}

/// Averages the outcomes of each policy, in the order of `policies`; those without any are left out.
pub fn summarise(policies: &[&str], outcomes: &[Outcome]) -> Vec<Summary> {
    let one = |policy: &&str| {
        let of: Vec<&Outcome> = outcomes.iter().filter(|o| o.policy == **policy).collect();
        let first = of.first()?;
        let runs: Vec<Figures> = of.iter().map(|o| o.figures.clone()).collect();
        let (mean, sd) = spread(&runs);
        let at = |i: usize| of.iter().map(|o| o.curve.get(i).copied().unwrap_or(0.0)).sum::<f64>();
        Some(Summary {
            policy: first.policy.clone(),
            mean,
            sd,
            seeds: of.len(),
            wall_s: of.iter().map(|o| o.wall_s).sum(),
            curve: (0..first.curve.len()).map(|i| at(i) / of.len() as f64).collect(),
            load: first.load.clone(),
        })
    };
    policies.iter().filter_map(one).collect()
}

/// The report as JSON. `partial`: the run was stopped before its end.
pub fn json(trace: &str, setting: &Setting, results: &[Summary], partial: bool) -> Value {
    let each = results.iter().map(|r| {
        let mut result = nest(&r.mean);
        if let Value::Object(map) = &mut result {
            map.insert("policy".into(), json!(r.policy));
            map.insert("seeds".into(), json!(r.seeds));
            map.insert("wall_s".into(), json!(r.wall_s));
            map.insert("spread".into(), nest(&r.sd));
        }
        result
    });
    let mut report = json!({"trace": trace, "setting": setting, "results": each.collect::<Vec<_>>()});
    if partial {
        report["partial"] = json!(true);
    }
    report
}

/// Dotted keys as nested objects, numbered ones as lists.
pub fn nest(flat: &Figures) -> Value {
    let mut root = Map::new();
    for (key, value) in flat {
        place(&mut root, key, *value);
    }
    listed(Value::Object(root))
}

fn place(map: &mut Map<String, Value>, key: &str, value: f64) {
    let Some((head, rest)) = key.split_once('.') else {
        map.insert(key.into(), json!((value * 1e6).round() / 1e6));
        return;
    };
    if let Value::Object(inner) = map.entry(head).or_insert_with(|| Value::Object(Map::new())) {
        place(inner, rest, value);
    }
}

fn listed(value: Value) -> Value {
    let Value::Object(map) = value else { return value };
    let mut numbered: Vec<(usize, &Value)> =
        map.iter().filter_map(|(k, v)| Some((k.parse::<usize>().ok()?, v))).collect();
    if !map.is_empty() && numbered.len() == map.len() {
        numbered.sort_by_key(|(k, _)| *k);
        return Value::Array(numbered.into_iter().map(|(_, v)| v.clone()).collect());
    }
    Value::Object(map.into_iter().map(|(k, v)| (k, listed(v))).collect())
}

/// The columns of the table: heading, key, decimals.
const COLUMNS: [(&str, &str, usize); 13] = [
    ("served", "goodput_pct", 1),
    ("direct%", "direct_pct", 1),
    ("LRU%", "direct_bound_pct.lru", 1),
    ("hit%", "hit_pct", 1),
    ("ttft p50", "ttft_ms.p50", 0),
    ("p90", "ttft_ms.p90", 0),
    ("p99", "ttft_ms.p99", 0),
    ("itl p50", "itl_ms.p50", 1),
    ("p99.9", "itl_ms.p999", 1),
    ("e2e p99", "e2e_ms.p99", 0),
    ("fallb%", "modes.fallback", 1),
    ("moved%", "moved_pct", 1),
    ("via P%", "used_prefill_pct", 1),
];

/// The table for a terminal.
pub fn table(results: &[Summary]) -> String {
    let mut text = format!("{:16}", "policy");
    for (heading, ..) in COLUMNS {
        let _ = write!(text, "{heading:>15}");
    }
    for r in results {
        let _ = write!(text, "\n{:16}", r.policy);
        for (_, key, decimals) in COLUMNS {
            let get = |f: &Figures| f.get(key).copied().unwrap_or(0.0);
            let cell = match r.seeds {
                1 => format!("{:.decimals$}", get(&r.mean)),
                _ => format!("{:.decimals$} ±{:.decimals$}", get(&r.mean), get(&r.sd)),
            };
            let _ = write!(text, "{cell:>15}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_nest_and_numbers_become_lists() {
        let flat: Figures =
            [("a.b", 1.0), ("a.c", 2.5), ("s.0", 3.0), ("s.1", 4.0), ("s.10", 5.0), ("x", 6.0)]
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v))
                .collect();
        let want = json!({"a": {"b": 1.0, "c": 2.5}, "s": [3.0, 4.0, 5.0], "x": 6.0});
        assert_eq!(nest(&flat), want);
    }
}
