//! What work costs on a worker, in modelled milliseconds: one model for placement, the ladder, the builtin
//! worker's timing and the replay lab.

use serde::{Deserialize, Serialize};

use super::able::Able;
use super::types::{Rung, Tokens, WorkerId};

/// A machine. `prefill(t) = quadratic·t² + linear·t + fixed`, in ms; an append of `n` tokens behind `c` costs
/// `prefill(c + n) − prefill(c) + fixed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// ms per token².
    pub prefill_quadratic: f64,
    /// ms per token.
    pub prefill_linear: f64,
    /// ms per prefill batch.
    pub prefill_fixed: f64,
    /// ms per decode step of an otherwise idle worker.
    pub decode_base: f64,
    /// ms more per decode step for each running turn.
    pub decode_per_running: f64,
    /// ms more per decode step when the pool is full (scaled by the active share).
    pub decode_per_pool: f64,
    /// KV bytes a token occupies on the modelled machine.
    pub kv_bytes_per_token: f64,
    /// Worker-to-worker bandwidth in bytes per ms.
    pub link_bytes_per_ms: f64,
    /// Latency of a transfer in ms.
    pub link_latency: f64,
    /// Bandwidth between a GPU and its node's host memory in bytes per ms.
    #[serde(default = "pcie")]
    pub host_bytes_per_ms: f64,
    /// Tokens a D prefills between two decode steps of its neighbours.
    pub chunk_tokens: Tokens,
    /// What it can do at all.
    #[serde(default)]
    pub able: Able,
}

impl CostModel {
    /// The machine of the figures in the docs: 100 K tokens of prefill in 2.5 s, RDMA at 25 GB/s, 96 KiB of KV
    /// a token, decode from 6 ms.
    pub const fn reference() -> Self {
        Self {
            prefill_quadratic: 0.0,
            prefill_linear: 0.025,
            prefill_fixed: 4.0,
            decode_base: 6.0,
            decode_per_running: 0.15,
            decode_per_pool: 6.0,
            kv_bytes_per_token: 98_304.0,
            link_bytes_per_ms: 25e6,
            link_latency: 1.0,
            host_bytes_per_ms: pcie(),
            chunk_tokens: 2048,
            able: Able::ALL,
        }
    }

    /// The published fit used by other simulators: `4.21e-7·t² + 0.01518·t + 16.5`. Their decode fit peaks at
    /// full pool with about 34 ms; a line through its ends stands in for it.
    pub const fn polynomial() -> Self {
        Self {
            prefill_quadratic: 4.21e-7,
            prefill_linear: 0.01518,
            prefill_fixed: 16.5,
            decode_base: 5.74,
            decode_per_running: 0.0,
            decode_per_pool: 28.27,
            ..Self::reference()
        }
    }

    /// ms to compute `new` tokens behind `context` tokens of KV. 0 for nothing.
    pub fn prefill_ms(&self, context: Tokens, new: Tokens) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let (c, n) = (context as f64, new as f64);
        self.prefill_quadratic * ((c + n) * (c + n) - c * c) + self.prefill_linear * n + self.prefill_fixed
    }

    /// ms of one decode step beside `running` turns that hold `active_share` (0..=1) of the pool.
    pub fn decode_ms(&self, running: u32, active_share: f64) -> f64 {
        self.decode_base
            + self.decode_per_running * f64::from(running)
            + self.decode_per_pool * active_share.clamp(0.0, 1.0)
    }

    /// ms to move the KV of `tokens`. 0 for nothing.
    pub fn transfer_ms(&self, tokens: Tokens) -> f64 {
        if tokens == 0 {
            return 0.0;
        }
        self.link_latency + tokens as f64 * self.kv_bytes_per_token / self.link_bytes_per_ms
    }

    /// ms to bring the KV of `tokens` up from the node's own host memory. 0 for nothing.
    pub fn host_ms(&self, tokens: Tokens) -> f64 {
        tokens as f64 * self.kv_bytes_per_token / self.host_bytes_per_ms
    }
}

/// PCIe 4.0 ×16.
const fn pcie() -> f64 {
    25e6
}

/// KV outside a D's pool that continues what the D holds of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Backup {
    /// Tokens right behind the D's own prefix, without a hole.
    pub tokens: Tokens,
    /// The P that sends them; `None` = the D's own host memory.
    pub source: Option<WorkerId>,
}

impl CostModel {
    /// Names the first value out of range: `(key, value, allowed)`.
    pub fn invalid(&self) -> Option<(&'static str, String, &'static str)> {
        let not_negative = [
            ("prefill_quadratic", self.prefill_quadratic),
            ("prefill_linear", self.prefill_linear),
            ("prefill_fixed", self.prefill_fixed),
            ("decode_base", self.decode_base),
            ("decode_per_running", self.decode_per_running),
            ("decode_per_pool", self.decode_per_pool),
            ("kv_bytes_per_token", self.kv_bytes_per_token),
            ("link_latency", self.link_latency),
        ];
        let bad = not_negative.iter().find(|(_, v)| !(v.is_finite() && *v >= 0.0));
        if let Some((key, value)) = bad {
            return Some((key, value.to_string(), "a number >= 0"));
        }
        if !(self.link_bytes_per_ms.is_finite() && self.link_bytes_per_ms > 0.0) {
            return Some(("link_bytes_per_ms", self.link_bytes_per_ms.to_string(), "a number > 0"));
        }
        (self.chunk_tokens < 1).then(|| ("chunk_tokens", "0".into(), "an integer >= 1"))
    }
}

impl Default for CostModel {
    fn default() -> Self {
        Self::reference()
    }
}

/// What the ladder chooses from. `None` = not available.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LadderInput {
    /// Length of the prompt in tokens.
    pub input_len: Tokens,
    /// Of these, held by the D.
    pub held_d: Tokens,
    /// What could be restored behind that.
    pub backup: Backup,
    /// Prompt tokens that the session's last turn left; the rest is new.
    pub prefix_len: Tokens,
    /// β: how far a P's backup may be behind to count as one.
    pub beta: Tokens,
    /// Of these, held by the P that would be used; `None` without a P.
    pub held_p: Option<Tokens>,
    /// Prompt tokens that wait at or run on that P.
    pub backlog_p: Tokens,
    /// Prompt tokens that wait at or run on the D.
    pub backlog_d: Tokens,
    /// Turns decoding on the D.
    pub running_d: u32,
}

/// How much of a local append's work is charged for each neighbour it slows. 0 gives the best TTFT tail, 1 the
/// best ITL tail; measured in the replay lab.
pub const INTERFERENCE: f64 = 0.25;

/// ms until D has computed the missing tokens itself, charged for its neighbours.
pub fn local_ms(input: &LadderInput, model: &CostModel) -> f64 {
    append_ms(input, input.held_d, model)
}

/// ms until the backup has reached D and D has computed the rest; `None` without a backup.
pub fn restore_ms(input: &LadderInput, model: &CostModel) -> Option<f64> {
    let Backup { tokens, source } = input.backup;
    if source.is_some() && !model.able.restore {
        return None;
    }
    let travel = if source.is_some() { model.transfer_ms(tokens) } else { model.host_ms(tokens) };
    (tokens > 0).then(|| travel + append_ms(input, input.held_d + tokens, model))
}

fn append_ms(input: &LadderInput, held: Tokens, model: &CostModel) -> f64 {
    let work = model.prefill_ms(held, input.input_len.saturating_sub(held));
    let backlog = model.prefill_linear * input.backlog_d as f64;
    backlog + work * (1.0 + INTERFERENCE * f64::from(input.running_d))
}

/// ms until P has computed what it lacks and the missing range has reached D.
pub fn full_ms(input: &LadderInput, model: &CostModel) -> Option<f64> {
    let held = input.held_p?;
    let backlog = model.prefill_linear * input.backlog_p as f64;
    let compute = model.prefill_ms(held, input.input_len.saturating_sub(held));
    let travel = model.transfer_ms(input.input_len.saturating_sub(input.held_d));
    Some(backlog + compute + travel)
}

/// The cheapest rung and its cost in ms. On a tie the one that needs fewer workers. `local` where nothing else is
/// left, also when D cannot do it: the turn machine refuses it then.
pub fn cheapest(input: &LadderInput, model: &CostModel) -> (Rung, f64) {
    let local = if model.able.local { local_ms(input, model) } else { f64::INFINITY };
    let mut best = (Rung::Local, local);
    let rest =
        [(Rung::Restore, restore_ms(input, model)), (through_p(input, model.able), full_ms(input, model))];
    for (rung, ms) in rest {
        if let Some(ms) = ms.filter(|ms| *ms < best.1) {
            best = (rung, ms);
        }
    }
    best
}

/// What a turn through P is called: by what P and D hold of it.
fn through_p(input: &LadderInput, able: Able) -> Rung {
    let held_p = input.held_p.unwrap_or(0);
    match () {
        // A D that keeps its prefix but cannot append to it: what travels is the difference, whatever P holds.
        () if input.held_d > 0 && able.delta && !able.direct => Rung::Delta,
        () if held_p == 0 => Rung::Full,
        () if input.held_d > 0 && able.delta && held_p >= input.held_d => Rung::Delta,
        () if held_p + input.beta >= input.prefix_len => Rung::Backup,
        () => Rung::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input() -> LadderInput {
        LadderInput { input_len: 100_000, held_p: Some(0), ..LadderInput::default() }
    }

    #[test]
    fn the_reference_machine_has_its_published_figures() {
        let m = CostModel::reference();
        assert!((m.prefill_ms(0, 100_000) - 2504.0).abs() < 1.0);
        assert!((m.transfer_ms(100_000) - 394.2).abs() < 1.0);
        assert_eq!((m.prefill_ms(5, 0), m.transfer_ms(0)), (0.0, 0.0));
        let p = CostModel::polynomial();
        assert!((p.prefill_ms(0, 10_000) - (42.1 + 151.8 + 16.5)).abs() < 0.01);
        let split = p.prefill_ms(0, 6000) + p.prefill_ms(6000, 4000);
        assert!((split - p.prefill_ms(0, 10_000) - 16.5).abs() < 1e-9);
    }

    /// A3: local when D is quiet, P when D is busy, local again when P's queue is long.
    #[test]
    fn the_ladder_weighs_neighbours_against_backlog() {
        let m = CostModel::reference();
        assert_eq!(cheapest(&input(), &m).0, Rung::Local);
        let busy = LadderInput { running_d: 8, ..input() };
        assert_eq!(cheapest(&busy, &m).0, Rung::Full);
        let queued = LadderInput { backlog_p: 400_000, ..busy };
        assert_eq!(cheapest(&queued, &m).0, Rung::Local);
        let fused = LadderInput { held_p: None, ..busy };
        assert_eq!(cheapest(&fused, &m).0, Rung::Local);
    }

    /// A backup beats both: no P queue, little to compute. Without one nothing changes.
    #[test]
    fn a_backup_is_restored() {
        let m = CostModel::reference();
        let backup = Backup { tokens: 98_000, source: Some(WorkerId(0)) };
        let (rung, ms) = cheapest(&LadderInput { backup, running_d: 4, ..input() }, &m);
        assert_eq!(rung, Rung::Restore);
        assert!((ms - (1.0 + 385.3 + 2.0 * 54.0)).abs() < 1.0, "{ms}");
        let slow = CostModel { link_bytes_per_ms: 1e6, ..m.clone() };
        assert_eq!(cheapest(&LadderInput { backup, ..input() }, &slow).0, Rung::Local);
        let own = Backup { source: None, ..backup };
        assert_eq!(cheapest(&LadderInput { backup: own, ..input() }, &slow).0, Rung::Restore);
    }

    /// A turn through P is named by what P and D hold.
    #[test]
    fn turns_through_p_have_names() {
        let m = CostModel::reference();
        let name = |held_d, held_p| {
            let held = LadderInput {
                held_d,
                held_p: Some(held_p),
                running_d: 40,
                prefix_len: 80_000,
                beta: 4096,
                ..input()
            };
            cheapest(&held, &m).0
        };
        assert_eq!(name(0, 0), Rung::Full);
        assert_eq!(name(0, 15_000), Rung::Full);
        assert_eq!(name(0, 75_904), Rung::Backup);
        assert_eq!(name(60_000, 75_000), Rung::Delta);
    }

    /// What D holds makes local cheaper and shortens P's transfer, but not P's prefill.
    #[test]
    fn held_prefix_counts_where_it_helps() {
        let m = CostModel::reference();
        let held = LadderInput { held_d: 90_000, running_d: 8, ..input() };
        assert_eq!(cheapest(&held, &m).0, Rung::Local);
        let drop = full_ms(&input(), &m).unwrap() - full_ms(&held, &m).unwrap();
        assert!((drop - 90_000.0 * m.kv_bytes_per_token / m.link_bytes_per_ms).abs() < 1e-6);
    }
}
