//! A D (or fused) worker's engine: continuous batching where a chunk of a local prefill slows every decode that
//! shares its step. Time between two changes of the batch is one event, not one per token.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::job::JobId;
use crate::core::cost::CostModel;
use crate::core::ledger::Ledger;
use crate::core::staleness::BackupStore;
use crate::core::types::Tokens;
use crate::replay::hist::Hist;

/// Progress of one decode step.
const STEP: u64 = 1_000_000;
/// Modes told apart in the figures.
pub const MODES: usize = 4;

#[derive(Debug)]
struct Part {
    job: JobId,
    /// Tokens of context in front of what is left.
    context: Tokens,
    left: Tokens,
    /// Answer tokens after the first.
    output: u64,
    /// Counted mode; `None` for warm-up turns.
    mode: Option<usize>,
    length: Tokens,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Running {
    /// Step at which it is complete.
    until: u64,
    job: JobId,
    mode: Option<usize>,
    length: Tokens,
}

#[derive(Debug)]
enum Step {
    Idle,
    /// Decodes only: `us` a step.
    Decode {
        us: u64,
    },
    /// One step with prefill chunks of these sizes.
    Mixed {
        ends: u64,
        us: u64,
        chunks: Vec<Tokens>,
    },
}

/// What a step brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The first token is out.
    First(JobId),
    /// The answer is complete.
    Done(JobId),
}

/// See the module.
#[derive(Debug)]
pub struct Decode {
    /// Its KV: the real ledger.
    pub ledger: Ledger,
    /// Host-memory tier of a fused worker.
    pub host: BackupStore,
    /// Turns that wait for room in the pool, in order.
    pub waiting: VecDeque<JobId>,
    /// When its network link is free.
    pub link_free: u64,
    /// When its link for pushes is free.
    pub push_free: u64,
    /// When its host link is free.
    pub host_free: u64,
    /// Tokens served, for the load figures.
    pub served: Tokens,
    /// ITL by mode.
    pub itl: [Hist; MODES],
    /// Events of an older generation are void.
    pub generation: u64,
    prefills: VecDeque<Part>,
    queued: Tokens,
    running: BinaryHeap<Reverse<Running>>,
    counted: [u64; MODES],
    active: Tokens,
    progress: u64,
    since: u64,
    step: Step,
}

impl Decode {
    /// An idle worker.
    pub fn new(ledger: Ledger, host: BackupStore) -> Self {
        Self {
            ledger,
            host,
            waiting: VecDeque::new(),
            link_free: 0,
            push_free: 0,
            host_free: 0,
            served: 0,
            itl: Default::default(),
            generation: 0,
            prefills: VecDeque::new(),
            queued: 0,
            running: BinaryHeap::new(),
            counted: [0; MODES],
            active: 0,
            progress: 0,
            since: 0,
            step: Step::Idle,
        }
    }

    /// Turns decoding or prefilling.
    pub fn running(&self) -> u32 {
        (self.running.len() + self.prefills.len()) as u32
    }

    /// Prompt tokens it still has to compute.
    pub fn queued(&self) -> Tokens {
        self.queued
    }

    /// Context tokens of the turns it runs.
    pub fn active(&self) -> Tokens {
        self.active
    }

    /// A prompt whose last `left` tokens it computes itself.
    pub fn append(&mut self, job: JobId, context: Tokens, left: Tokens, output: u64, mode: Option<usize>) {
        let length = context + left + output;
        self.queued += left;
        self.active += length;
        self.prefills.push_back(Part { job, context, left, output: output - 1, mode, length });
    }

    /// A prompt whose KV is complete and whose first token is out. `true`: nothing is left to decode.
    pub fn join(&mut self, job: JobId, context: Tokens, output: u64, mode: Option<usize>) -> bool {
        if output <= 1 {
            return true;
        }
        let length = context + output;
        self.active += length;
        let late = u64::from(matches!(self.step, Step::Mixed { .. }));
        self.start(job, output - 1 + late, mode, length);
        false
    }

    fn start(&mut self, job: JobId, steps: u64, mode: Option<usize>, length: Tokens) {
        if let Some(mode) = mode {
            self.counted[mode] += 1;
        }
        self.running.push(Reverse(Running { until: self.progress + steps * STEP, job, mode, length }));
    }

    /// Brings the books up to `now`; appends what happened.
    pub fn settle(&mut self, now: u64, out: &mut Vec<Outcome>) {
        match &self.step {
            Step::Idle => {}
            Step::Decode { us } => {
                let (us, elapsed) = (*us, now - self.since);
                let steps = (u128::from(elapsed) * u128::from(STEP) / u128::from(us)) as u64;
                self.progress += steps;
                self.count(us, steps);
                self.since = now;
            }
            Step::Mixed { ends, .. } if *ends > now => return,
            Step::Mixed { us, chunks, .. } => {
                let (us, chunks) = (*us, chunks.clone());
                self.progress += STEP;
                self.count(us, STEP);
                self.since = now;
                self.step = Step::Idle;
                self.advance(&chunks, out);
            }
        }
        while self.running.peek().is_some_and(|Reverse(r)| r.until <= self.progress) {
            let Some(Reverse(done)) = self.running.pop() else { break };
            if let Some(mode) = done.mode {
                self.counted[mode] -= 1;
            }
            self.active -= done.length;
            out.push(Outcome::Done(done.job));
        }
    }

    fn advance(&mut self, chunks: &[Tokens], out: &mut Vec<Outcome>) {
        for chunk in chunks {
            let Some(part) = self.prefills.front_mut() else { break };
            part.left -= chunk;
            part.context += chunk;
            self.queued -= chunk;
            if part.left > 0 {
                break;
            }
            let Some(part) = self.prefills.pop_front() else { break };
            out.push(Outcome::First(part.job));
            if part.output == 0 {
                self.active -= part.length;
                out.push(Outcome::Done(part.job));
            } else {
                self.start(part.job, part.output, part.mode, part.length);
            }
        }
    }

    fn count(&mut self, us: u64, steps: u64) {
        for (hist, n) in self.itl.iter_mut().zip(self.counted) {
            if n > 0 && steps > 0 {
                hist.add(us, steps * n);
            }
        }
    }

    /// Plans from `now` (settled) until the next event; returns its time. Call after every change.
    pub fn plan(&mut self, now: u64, cost: &CostModel) -> Option<u64> {
        self.generation += 1;
        self.since = now;
        if let Step::Mixed { ends, .. } = &self.step
            && *ends > now
        {
            return Some(*ends);
        }
        let share = self.active as f64 / self.ledger.k_d().max(1) as f64;
        let decoding = self.running.len() as u32;
        let decode_ms = if decoding == 0 { 0.0 } else { cost.decode_ms(decoding, share) };
        if !self.prefills.is_empty() {
            let (chunks, ms) = self.chunks(cost);
            let us = (((decode_ms + ms) * 1000.0).round() as u64).max(1);
            self.step = Step::Mixed { ends: now + us, us, chunks };
            return Some(now + us);
        }
        let Some(Reverse(next)) = self.running.peek() else {
            self.step = Step::Idle;
            return None;
        };
        let us = ((decode_ms * 1000.0).round() as u64).max(1);
        let left = u128::from(next.until - self.progress);
        self.step = Step::Decode { us };
        Some(now + (left * u128::from(us)).div_ceil(u128::from(STEP)) as u64)
    }

    /// The next step's share of the prefill queue, first come first served, and its cost in ms.
    fn chunks(&self, cost: &CostModel) -> (Vec<Tokens>, f64) {
        let mut room = cost.chunk_tokens;
        let (mut chunks, mut ms) = (Vec::new(), 0.0);
        for part in &self.prefills {
            if room == 0 {
                break;
            }
            let n = part.left.min(room);
            room -= n;
            ms += cost.prefill_ms(part.context, n);
            if !chunks.is_empty() {
                ms -= cost.prefill_fixed;
            }
            chunks.push(n);
        }
        (chunks, ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::options::Options;

    fn worker() -> Decode {
        Decode::new(Ledger::new(Options::production(), 1_000_000, 1), BackupStore::new(0))
    }

    fn run(d: &mut Decode, cost: &CostModel, mut now: u64) -> Vec<(u64, Outcome)> {
        let (mut seen, mut out) = (Vec::new(), Vec::new());
        while let Some(at) = d.plan(now, cost) {
            now = at;
            d.settle(now, &mut out);
            seen.extend(out.drain(..).map(|o| (now, o)));
        }
        seen
    }

    /// An append takes one step, the answer the rest; ITL is what the cost model says.
    #[test]
    fn a_quiet_worker_runs_at_the_models_speed() {
        let (mut d, cost) = (worker(), CostModel { decode_per_pool: 0.0, ..CostModel::reference() });
        d.append(7, 10_000, 1000, 11, Some(0));
        let seen = run(&mut d, &cost, 0);
        assert_eq!(seen, [(29_000, Outcome::First(7)), (29_000 + 61_500, Outcome::Done(7))]);
        assert!((d.itl[0].quantile(0.5).unwrap() / 6150.0 - 1.0).abs() < 0.011);
        assert_eq!((d.active(), d.queued(), d.running()), (0, 0, 0));
    }

    /// The reason for P/D separation: a local prefill stretches its neighbours' steps to a chunk each.
    #[test]
    fn a_local_prefill_slows_its_neighbours() {
        let (mut d, cost) = (worker(), CostModel { decode_per_pool: 0.0, ..CostModel::reference() });
        assert!(!d.join(1, 50_000, 101, Some(0)));
        d.append(2, 0, 20_480, 1, Some(1));
        let seen = run(&mut d, &cost, 0);
        let mixed = 6150 + 51_200 + 4000;
        assert_eq!(seen[0], (10 * mixed, Outcome::First(2)));
        assert_eq!(seen[2], (10 * mixed + 90 * 6150, Outcome::Done(1)));
        assert!(d.itl[0].quantile(0.99).unwrap() > 60_000.0 && d.itl[0].quantile(0.5).unwrap() < 6300.0);
    }

    /// Appends that fit one chunk share a step; the first in the queue is never overtaken.
    #[test]
    fn small_appends_share_a_step() {
        let (mut d, cost) = (worker(), CostModel::reference());
        (0..3).for_each(|job| d.append(job, 1000, 600, 1, None));
        d.append(3, 0, 3000, 1, None);
        let seen = run(&mut d, &cost, 0);
        assert!(seen[..6].iter().all(|(at, _)| *at == seen[0].0));
        assert_eq!(seen.last().map(|s| s.1), Some(Outcome::Done(3)));
    }
}
