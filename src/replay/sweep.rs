//! `kvc-router replay sweep`: K_d × live sessions × policies, parallel over cores, resumable.
//!
//! The state file holds one line per finished (setting, seed): a second run with the same file computes only
//! what is missing. A line that was cut off by a crash is ignored and computed again.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::exec::{self, Unit};
use super::figures::Figures;
use super::policy::Policy;
use super::report::{self, Outcome, Summary};
use super::settings::Setting;
use super::sim::Control;
use super::trace::Trace;

/// One cell of a sweep.
#[derive(Debug, Clone)]
pub struct Point {
    /// `K_d`.
    pub kv_tokens: u64,
    /// Live sessions.
    pub sessions: u32,
    /// Each policy, over the seeds.
    pub results: Vec<Summary>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Done {
    key: u64,
    results: Vec<(String, Figures, f64)>,
}

/// Runs what the state file lacks; returns the cells in order of (sessions, K_d) and whether all are complete.
///
/// # Errors
/// The state file cannot be read or written.
pub fn run(
    trace: &Trace,
    cells: &[Setting],
    policies: &[&Policy],
    jobs: usize,
    state: Option<&Path>,
    control: &Control,
) -> Result<(Vec<Point>, bool), String> {
    let units: Vec<Unit> = cells
        .iter()
        .flat_map(|s| (0..u64::from(s.seeds)).map(|i| Unit { setting: s.clone(), seed: s.seed + i }))
        .collect();
    let keys: Vec<u64> = units.iter().map(|u| key(trace, u, policies)).collect();
    let mut known = state.map_or_else(|| Ok(HashMap::new()), load)?;
    let missing: Vec<usize> = (0..units.len()).filter(|i| !known.contains_key(&keys[*i])).collect();
    let todo: Vec<Unit> = missing.iter().map(|i| units[*i].clone()).collect();
    let out = state.map(append).transpose()?.map(Mutex::new);
    let fresh = exec::run(trace, &todo, policies, jobs, control, &|i, outcomes| {
        let line = Done { key: keys[missing[i]], results: outcomes.iter().map(pack).collect() };
        if let (Some(Ok(mut file)), Ok(text)) = (out.as_ref().map(Mutex::lock), serde_json::to_string(&line))
        {
            // A failed write costs the resume, not the result.
            let _ = writeln!(file, "{text}");
        }
    });
    for (place, outcomes) in missing.into_iter().zip(fresh) {
        if outcomes.len() == policies.len() {
            known.insert(keys[place], outcomes.iter().map(pack).collect());
        }
    }
    let complete = keys.iter().all(|k| known.contains_key(k));
    let names: Vec<&str> = policies.iter().map(|p| p.name).collect();
    let mut at = 0;
    let mut points = Vec::new();
    for cell in cells {
        let mine = &keys[at..at + cell.seeds as usize];
        at += cell.seeds as usize;
        let outcomes: Vec<Outcome> = mine.iter().filter_map(|k| known.get(k)).flatten().map(unpack).collect();
        let results = report::summarise(&names, &outcomes);
        points.push(Point { kv_tokens: cell.kv_tokens, sessions: cell.sessions, results });
    }
    Ok((points, complete))
}

type Packed = (String, Figures, f64);

fn pack(o: &Outcome) -> Packed {
    (o.policy.clone(), o.figures.clone(), o.wall_s)
}

fn unpack((policy, figures, wall_s): &Packed) -> Outcome {
    let figures = figures.clone();
    Outcome { policy: policy.clone(), figures, wall_s: *wall_s, curve: Vec::new(), load: Vec::new() }
}

/// Everything a unit's figures depend on.
fn key(trace: &Trace, unit: &Unit, policies: &[&Policy]) -> u64 {
    let mut setting = json!(unit.setting);
    // More seeds later do not change the ones that are done.
    setting["seed"] = json!(unit.seed);
    setting["seeds"] = Value::Null;
    let names: Vec<&str> = policies.iter().map(|p| p.name).collect();
    let version = env!("CARGO_PKG_VERSION");
    xxh3_64(json!([trace.name, trace.turns(), setting, names, version]).to_string().as_bytes())
}

fn load(path: &Path) -> Result<HashMap<u64, Vec<Packed>>, String> {
    match fs::read_to_string(path) {
        Ok(text) => {
            let lines = text.lines().filter_map(|l| serde_json::from_str::<Done>(l).ok());
            Ok(lines.map(|d| (d.key, d.results)).collect())
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(HashMap::new()),
        Err(e) => Err(format!("{}: {e}", path.display())),
    }
}

fn append(path: &Path) -> Result<fs::File, String> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut file = file.map_err(|e| format!("{}: {e}", path.display()))?;
    // Ends a line that a crash may have cut off.
    writeln!(file).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(file)
}
