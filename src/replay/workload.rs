//! Which session sends what when: AgentX lanes.
//!
//! Closed loop: `sessions` lanes are live; each plays one session after another from a seeded shuffle, starting
//! each at a random 25–75 % of its turns (a trace of short conversations from its start), until the file is used
//! up. Open loop: every session is its own lane. A sub-agent starts beside its parent, in the parent's lane.

use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::settings::{Arrival, Setting};
use super::trace::{Chain, IDLE_CAP_US, SessionSpec, Trace, with_answer};
use crate::core::types::{BlockHash, SessionId, Tokens};

/// Sessions with fewer turns than this start at their first one.
const SHORT: usize = 8;

/// A session being played.
#[derive(Debug)]
pub struct Live {
    /// Its place in the trace.
    pub session: usize,
    /// The next (or running) turn in the trace.
    pub turn: usize,
    /// The lane that plays it.
    pub lane: usize,
    /// Its id for the router.
    pub id: SessionId,
    /// Turns served so far, for `t(r)`.
    pub served: u32,
    chain: Chain,
    prompt: Option<Arc<[BlockHash]>>,
    next: Option<Arc<[BlockHash]>>,
    /// What the last answer left: its whole blocks and their tokens.
    pub committed: Arc<[BlockHash]>,
    /// Open loop: when the session starts, minus its first turn's recorded time.
    offset: u64,
}

/// A turn that is sent now.
#[derive(Debug)]
pub struct Sent {
    /// The prompt's whole blocks.
    pub chain: Arc<[BlockHash]>,
    /// Those of prompt plus answer.
    pub full: Arc<[BlockHash]>,
    /// Whether it counts in the figures.
    pub measured: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Workload<'a> {
    trace: &'a Trace,
    setting: &'a Setting,
    rng: SmallRng,
    /// Sessions not yet played, last first.
    order: Vec<usize>,
    /// All sessions that ever lived.
    pub lives: Vec<Live>,
    /// Requests of each lane so far.
    requests: Vec<u32>,
    /// Live sessions per lane (sub-agents included).
    population: Vec<u32>,
    children: Vec<Vec<usize>>,
}

impl<'a> Workload<'a> {
    /// The workload of one seed.
    pub fn new(trace: &'a Trace, setting: &'a Setting, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut children = vec![Vec::new(); trace.sessions.len()];
        for (i, s) in trace.sessions.iter().enumerate() {
            if let Some((parent, _)) = s.parent {
                children[parent].push(i);
            }
        }
        let mut order: Vec<usize> =
            (0..trace.sessions.len()).filter(|&i| trace.sessions[i].parent.is_none()).collect();
        if setting.arrival == Arrival::Closed {
            order.shuffle(&mut rng);
        }
        order.reverse();
        Self {
            trace,
            setting,
            rng,
            order,
            lives: Vec::new(),
            requests: Vec::new(),
            population: Vec::new(),
            children,
        }
    }

    /// The first arrivals: `(time in µs, live session)`.
    pub fn begin(&mut self) -> Vec<(u64, usize)> {
        let lanes = match self.setting.arrival {
            Arrival::Closed => self.order.len().min(self.setting.sessions as usize),
            Arrival::Open => self.order.len(),
        };
        self.requests = vec![0; lanes];
        self.population = vec![0; lanes];
        (0..lanes).filter_map(|lane| self.next_session(lane, 0)).collect()
    }

    /// Lanes that play a session now.
    pub fn live_lanes(&self) -> usize {
        self.population.iter().filter(|n| **n > 0).count()
    }

    /// All lanes.
    pub fn lanes(&self) -> usize {
        self.population.len()
    }

    fn next_session(&mut self, lane: usize, now: u64) -> Option<(u64, usize)> {
        let session = self.order.pop()?;
        let spec = &self.trace.sessions[session];
        let (turn, at, offset) = match self.setting.arrival {
            Arrival::Open => (0, self.scaled(spec.turns[0].at), 0),
            Arrival::Closed => {
                let turn = self.start(spec);
                // Lanes begin apart, as if the session had been thinking for a while already.
                let gap = self.gap(session, turn).max(1_000_000);
                (turn, now + self.rng.random_range(0..gap), 0)
            }
        };
        Some((at, self.open(session, turn, lane, offset)))
    }

    fn start(&mut self, spec: &SessionSpec) -> usize {
        let n = spec.turns.len();
        if n < SHORT { 0 } else { self.rng.random_range(n / 4..=n * 3 / 4) }
    }

    fn open(&mut self, session: usize, turn: usize, lane: usize, offset: u64) -> usize {
        let spec = &self.trace.sessions[session];
        let factor = self.setting.block / self.trace.block.max(1);
        self.population[lane] += 1;
        self.lives.push(Live {
            session,
            turn,
            lane,
            id: SessionId::new(&spec.name),
            served: 0,
            chain: Chain::new(spec, self.setting.shared_prefix, self.trace.block, factor),
            prompt: None,
            next: None,
            committed: Arc::from(Vec::new()),
            offset,
        });
        self.lives.len() - 1
    }

    /// A live session sends its next turn.
    pub fn send(&mut self, live: usize) -> Sent {
        let trace = self.trace;
        let l = &mut self.lives[live];
        let spec = &trace.sessions[l.session];
        let turn = &spec.turns[l.turn];
        let chain = l.next.take().unwrap_or_else(|| l.chain.advance(turn));
        l.next = spec.turns.get(l.turn + 1).map(|next| l.chain.advance(next));
        let blocks = (turn.input + turn.output) / Tokens::from(self.setting.block);
        let salt = (l.session as u64) << 32 | l.turn as u64;
        let full = with_answer(&chain, l.next.as_ref(), blocks as usize, salt);
        l.prompt = Some(chain.clone());
        self.requests[l.lane] += 1;
        Sent { chain, full, measured: self.requests[l.lane] > self.setting.lab.warmup }
    }

    /// A turn is over. Returns what arrives next because of it, and the id of a session that ended.
    pub fn over(
        &mut self,
        live: usize,
        full: Option<Arc<[BlockHash]>>,
        now: u64,
    ) -> (Vec<(u64, usize)>, bool) {
        let l = &mut self.lives[live];
        let (session, turn, lane, offset) = (l.session, l.turn, l.lane, l.offset);
        l.turn += 1;
        if let Some(full) = full {
            l.served += 1;
            l.committed = full;
        }
        let mut arrivals = Vec::new();
        for child in self.children[session].clone() {
            let spec = &self.trace.sessions[child];
            if spec.parent == Some((session, turn)) {
                // `delay` counts from the parent's start; its answer is over now.
                let delay = spec.delay.min(IDLE_CAP_US).saturating_sub(1_000_000);
                let at = now + self.scaled(delay);
                let opened = self.open(child, 0, lane, offset);
                arrivals.push((at, opened));
            }
        }
        let spec = &self.trace.sessions[session];
        if turn + 1 < spec.turns.len() {
            let at = match self.setting.arrival {
                Arrival::Closed => now + self.gap(session, turn + 1),
                Arrival::Open => (self.scaled(spec.turns[turn + 1].at) + offset).max(now),
            };
            arrivals.push((at, live));
            return (arrivals, false);
        }
        self.lives[live].next = None;
        self.population[lane] -= 1;
        if self.population[lane] == 0 && self.setting.arrival == Arrival::Closed {
            arrivals.extend(self.next_session(lane, now));
        }
        (arrivals, true)
    }

    /// Think time before a turn.
    fn gap(&self, session: usize, turn: usize) -> u64 {
        self.scaled(self.trace.sessions[session].turns[turn].gap.min(IDLE_CAP_US))
    }

    fn scaled(&self, us: u64) -> u64 {
        (us as f64 * self.setting.time_scale).round() as u64
    }
}
