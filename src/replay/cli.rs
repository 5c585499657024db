//! `kvc-router replay`.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::{Map, Value, json};

use super::figures::{self, Figures};
use super::policy::{self, Policy};
use super::settings::{Arrival, Setting};
use super::sim::{self, Control};
use super::trace::{SharedPrefix, Trace};

/// Replays traces through the router's core and the policies of the field.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// Trace files: *.sessions.jsonl[.gz] or Mooncake JSONL.
    #[arg(long, num_args = 1.., required = true)]
    pub trace: Vec<PathBuf>,
    /// Policies, comma-separated, or all.
    #[arg(long, default_value = "kvc,kvc-paper,pd-round-robin,dp-sticky")]
    pub policies: String,
    /// P workers.
    #[arg(long, default_value_t = 1)]
    pub prefill: u32,
    /// D workers.
    #[arg(long, default_value_t = 3)]
    pub decode: u32,
    /// KV pool of each worker in tokens.
    #[arg(long, default_value_t = 92_104)]
    pub kv_tokens: u64,
    /// Tokens per block, a multiple of the trace's; the trace's when absent.
    #[arg(long)]
    pub block: Option<u32>,
    /// Live sessions.
    #[arg(long, default_value_t = 52)]
    pub sessions: u32,
    /// Closed loop of live sessions, or open loop by recorded times.
    #[arg(long, value_enum, default_value_t = Arrival::Closed)]
    pub arrival: Arrival,
    /// Factor on think times or recorded times.
    #[arg(long, default_value_t = 1.0)]
    pub time_scale: f64,
    /// Which sessions share their system prefix.
    #[arg(long, value_enum, default_value_t = SharedPrefix::Group)]
    pub shared_prefix: SharedPrefix,
    /// First seed.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Seeds to average over.
    #[arg(long, default_value_t = 1)]
    pub seeds: u32,
    /// Any option: KEY (of kvc), paper.KEY, cost.KEY, lab.KEY.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Write the report as JSON; - for standard output.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Runs the command; returns the exit code.
pub fn run(args: &ReplayArgs) -> i32 {
    match execute(args) {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("error: {message}");
            2
        }
    }
}

fn execute(args: &ReplayArgs) -> Result<(), String> {
    let trace = Trace::read(&args.trace)?;
    let mut setting = Setting {
        prefill: args.prefill,
        decode: args.decode,
        kv_tokens: args.kv_tokens,
        sessions: args.sessions,
        arrival: args.arrival,
        time_scale: args.time_scale,
        shared_prefix: args.shared_prefix,
        seed: args.seed,
        seeds: args.seeds,
        ..Setting::default()
    };
    setting.set_block(args.block.unwrap_or(trace.block));
    for text in &args.set {
        setting.set(text)?;
    }
    setting.check()?;
    let policies = policy::list(&args.policies)?;
    let control = Control::default();
    let mut seeds: Vec<Vec<(Figures, f64)>> = Vec::new();
    for seed in setting.seed..setting.seed + u64::from(setting.seeds) {
        seeds.push(one_seed(&trace, &setting, &policies, seed, &control));
    }
    let mut results = Vec::new();
    for (i, p) in policies.iter().enumerate() {
        let runs: Vec<Figures> = seeds.iter().map(|s| s[i].0.clone()).collect();
        let wall: f64 = seeds.iter().map(|s| s[i].1).sum();
        let (mean, sd) = figures::spread(&runs);
        println!(
            "{:16} turns {:6.0} direct {:5.1} hit {:5.1}/{:5.1} ttft {:8.0} {:8.0} {:8.0} itl {:5.1} {:6.1} {:6.1} moved {:4.1} fb {:4.1} P {:4.1}% imb {:.2} rej429 {:.0} stuck {} wall {wall:.2}",
            p.name,
            mean["turns"],
            mean["direct_pct"],
            mean["hit_pct"],
            mean["ideal_hit_pct"],
            mean["ttft_ms.p50"],
            mean["ttft_ms.p90"],
            mean["ttft_ms.p99"],
            mean["itl_ms.p50"],
            mean["itl_ms.p99"],
            mean["itl_ms.p999"],
            mean["moved_pct"],
            mean["modes.fallback"],
            mean["used_prefill_pct"],
            mean["imbalance"],
            mean["retries_429"],
            mean["stuck"],
        );
        results.push(json!({"policy": p.name, "figures": nest(&mean), "spread": nest(&sd), "wall_s": wall}));
    }
    if let Some(path) = &args.json {
        let report = json!({"trace": trace.name, "setting": setting, "results": results});
        let text = serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?;
        if path.as_os_str() == "-" {
            println!("{text}");
        } else {
            std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(())
}

fn one_seed(
    trace: &Trace,
    setting: &Setting,
    policies: &[&Policy],
    seed: u64,
    control: &Control,
) -> Vec<(Figures, f64)> {
    let mut runs = Vec::new();
    for p in policies {
        let begin = Instant::now();
        if let Some(run) = sim::run(trace, setting, p, seed, control) {
            let wall = begin.elapsed().as_secs_f64();
            runs.push((run, wall));
        }
    }
    let common: Option<HashSet<_>> =
        runs.iter().map(|(r, _)| figures::served(r)).reduce(|a, b| a.intersection(&b).copied().collect());
    let common = common.unwrap_or_default();
    runs.into_iter().map(|(r, wall)| (figures::figures(&r, &common), wall)).collect()
}

/// Dotted keys as nested objects.
fn nest(flat: &Figures) -> Value {
    let mut root = Map::new();
    for (key, value) in flat {
        place(&mut root, key, *value);
    }
    Value::Object(root)
}

fn place(map: &mut Map<String, Value>, key: &str, value: f64) {
    let Some((head, rest)) = key.split_once('.') else {
        map.insert(key.into(), json!(value));
        return;
    };
    if let Value::Object(inner) = map.entry(head).or_insert_with(|| Value::Object(Map::new())) {
        place(inner, rest, value);
    }
}
