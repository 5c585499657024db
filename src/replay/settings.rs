//! What a replay runs on: machines, memory, load, and the algorithm's options.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::trace::SharedPrefix;
use crate::core::cost::CostModel;
use crate::core::options::Options;
use crate::core::types::Tokens;

/// When sessions arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum, Default)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// A fixed number of live sessions; a turn follows the previous answer after its recorded think time.
    #[default]
    Closed,
    /// Turns come at their recorded times, but never before the previous answer.
    Open,
}

/// One configuration of the lab. Serialised into every report.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// P workers. Fused policies get `prefill + decode` workers.
    pub prefill: u32,
    /// D workers.
    pub decode: u32,
    /// `K_d`: KV pool of every worker, P included, in tokens.
    pub kv_tokens: Tokens,
    /// Tokens per block.
    pub block: u32,
    /// Live sessions.
    pub sessions: u32,
    /// Closed or open loop.
    pub arrival: Arrival,
    /// Factor on think times (closed) or on recorded times (open).
    pub time_scale: f64,
    /// First seed.
    pub seed: u64,
    /// Seeds averaged.
    pub seeds: u32,
    /// Who shares system prefixes.
    pub shared_prefix: SharedPrefix,
    /// Name of the cost model.
    pub cost_name: String,
    /// The machine.
    pub cost: CostModel,
    /// Finer points.
    pub lab: Lab,
    /// Options of `kvc` and `kvc-fused`.
    pub kvc: Options,
    /// Options of `kvc-paper`.
    pub paper: Options,
}

/// Knobs of the simulation itself (`--set lab.KEY=VALUE`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lab {
    /// Requests of each lane that are left out of the figures.
    pub warmup: u32,
    /// Longest time the whole system is idle, in ms.
    pub idle_cap_ms: u64,
    /// Tokens a P computes in one batch, unless one prompt is longer.
    pub batch_tokens: Tokens,
    /// Host memory for KV in the whole fleet, in tokens: at the P nodes for `pd-*`, `kvc` and `kvc-paper`,
    /// spread over the workers for fused policies.
    pub host_tokens: Tokens,
    /// Share of each P's own pool that is set aside for backups, 0 to 0.95.
    pub backup_share: f64,
    /// A backup that is further behind than β is used for what it is worth (ablation).
    pub beyond_beta: bool,
    /// A session that ends frees its KV at once (needs a client that says so).
    pub end_frees: bool,
    /// Order eviction by last use alone, not by how soon the session is likely back.
    pub plain_lru: bool,
    /// One wait queue per D instead of a global one (ablation).
    pub queue_per_worker: bool,
    /// Rejects are never reset by a success: the published v1 (ablation).
    pub keep_rejects: bool,
    /// ms until a client repeats a turn that was answered 429.
    pub retry_ms: u64,
    /// ms after which it gives up.
    pub give_up_ms: u64,
}

impl Default for Lab {
    fn default() -> Self {
        Self {
            warmup: 10,
            idle_cap_ms: 10_000,
            batch_tokens: 16_384,
            host_tokens: 0,
            backup_share: 0.0,
            beyond_beta: false,
            end_frees: false,
            plain_lru: false,
            queue_per_worker: false,
            keep_rejects: false,
            retry_ms: 1000,
            give_up_ms: 300_000,
        }
    }
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            prefill: 1,
            decode: 3,
            kv_tokens: 92_104,
            block: 64,
            sessions: 52,
            arrival: Arrival::Closed,
            time_scale: 1.0,
            seed: 42,
            seeds: 1,
            shared_prefix: SharedPrefix::Group,
            cost_name: "reference".into(),
            cost: CostModel::reference(),
            lab: Lab::default(),
            kvc: Options { block_tokens: 64, ..Options::production() },
            paper: Options { block_tokens: 64, ..Options::paper() },
        }
    }
}

impl Setting {
    /// Changes the block everywhere it counts.
    pub fn set_block(&mut self, block: u32) {
        self.block = block;
        self.kvc.block_tokens = block;
        self.paper.block_tokens = block;
    }

    /// `--set key=value`: an option of `kvc` (`tau_append=2048`), of the paper's preset (`paper.rho=0.9`), a
    /// figure of the machine (`cost.link_latency=3`) or a knob of the lab (`lab.warmup=0`).
    ///
    /// # Errors
    /// The key or value that is wrong.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let (key, value) = text.split_once('=').ok_or(format!("{text:?} is not key=value"))?;
        let value = match value {
            "inf" => Value::Null,
            other => serde_json::from_str(other).unwrap_or_else(|_| Value::String(other.into())),
        };
        match key.split_once('.') {
            None => patch(&mut self.kvc, key, value),
            Some(("kvc", key)) => patch(&mut self.kvc, key, value),
            Some(("paper", key)) => patch(&mut self.paper, key, value),
            Some(("cost", key)) => patch(&mut self.cost, key, value),
            Some(("lab", key)) => patch(&mut self.lab, key, value),
            Some((room, _)) => Err(format!("{room:?} is not one of kvc, paper, cost, lab")),
        }
        .map_err(|e| format!("{text}: {e}"))?;
        let block = if key == "block_tokens" { self.kvc.block_tokens } else { self.block };
        self.set_block(block);
        Ok(())
    }

    /// The first thing that makes no sense.
    ///
    /// # Errors
    /// What is wrong with which value.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, low: f64, high: f64| {
            if value.is_finite() && (low..=high).contains(&value) {
                return Ok(());
            }
            Err(format!("{name} = {value}: expected {low} to {high}"))
        };
        within("--prefill", self.prefill.into(), 0.0, 1024.0)?;
        within("--decode", self.decode.into(), 1.0, 1024.0)?;
        within("--block", self.block.into(), 1.0, 1e6)?;
        within("--kv-tokens", self.kv_tokens as f64, self.block.into(), 1e12)?;
        within("--sessions", self.sessions.into(), 1.0, 1e6)?;
        within("--seeds", self.seeds.into(), 1.0, 1e4)?;
        within("--time-scale", self.time_scale, 1e-6, 1e6)?;
        let c = &self.cost;
        for (name, value) in [
            ("cost.prefill_quadratic", c.prefill_quadratic),
            ("cost.prefill_linear", c.prefill_linear),
            ("cost.prefill_fixed", c.prefill_fixed),
            ("cost.decode_per_running", c.decode_per_running),
            ("cost.decode_per_pool", c.decode_per_pool),
            ("cost.kv_bytes_per_token", c.kv_bytes_per_token),
            ("cost.link_latency", c.link_latency),
        ] {
            within(name, value, 0.0, 1e9)?;
        }
        within("cost.decode_base", c.decode_base, 0.001, 1e6)?;
        within("cost.link_bytes_per_ms", c.link_bytes_per_ms, 1.0, 1e15)?;
        within("cost.chunk_tokens", c.chunk_tokens as f64, 1.0, 1e9)?;
        within("cost.host_bytes_per_ms", c.host_bytes_per_ms, 1.0, 1e15)?;
        within("lab.backup_share", self.lab.backup_share, 0.0, 0.95)?;
        within("lab.retry_ms", self.lab.retry_ms as f64, 1.0, 1e9)?;
        for (room, options) in [("", &self.kvc), ("paper.", &self.paper)] {
            if let Some((key, value, allowed)) = options.invalid() {
                return Err(format!("{room}{key} = {value}: expected {allowed}"));
            }
        }
        Ok(())
    }
}

/// Replaces one field of a settings struct.
fn patch<T: Serialize + for<'a> Deserialize<'a>>(
    target: &mut T,
    key: &str,
    value: Value,
) -> Result<(), String> {
    let mut map = serde_json::to_value(&*target).map_err(|e| e.to_string())?;
    match map.get_mut(key) {
        Some(slot) => *slot = value,
        None => {
            let keys = map.as_object().map_or_else(Vec::new, |m| m.keys().cloned().collect());
            return Err(format!("no such key; one of {}", keys.join(", ")));
        }
    }
    *target = serde_json::from_value(map).map_err(|e| e.to_string())?;
    Ok(())
}
