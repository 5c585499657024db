//! One turn on its way through the simulated fleet.

use std::sync::Arc;

use crate::core::types::{BlockHash, Mode, Rung, SessionId, StopKind, Tokens};

/// Names a job: its place in [`super::fleet::Fleet::jobs`].
pub type JobId = usize;

/// How a turn is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Direct, Seed, Reseed, Fallback.
    pub mode: Mode,
    /// What computes the missing tokens.
    pub rung: Rung,
    /// Place of the P, when the rung uses one.
    pub prefill: Option<usize>,
    /// Place of the D.
    pub decode: usize,
    /// Whether D granted a lease under [`Job::request_id`].
    pub admitted: bool,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Job {
    /// The live session.
    pub live: usize,
    /// `s(r)`.
    pub session: SessionId,
    /// `t(r)`: turns of the session before this one.
    pub turn: u32,
    /// The prompt's whole blocks.
    pub chain: Arc<[BlockHash]>,
    /// Those of prompt plus answer.
    pub full: Arc<[BlockHash]>,
    /// Prompt tokens.
    pub input: Tokens,
    /// Answer tokens.
    pub output: Tokens,
    /// Tokens beyond the session's last commit.
    pub append: Tokens,
    /// How the answer stops.
    pub stop: StopKind,
    /// When the client sent it first.
    pub arrival: u64,
    /// Whether it counts in the figures.
    pub measured: bool,
    /// Session and turn in the trace.
    pub key: (usize, usize),
    /// Output tokens Admit is asked to reserve.
    pub reserve: Tokens,
    /// How it is executed, once that is decided.
    pub plan: Option<Plan>,
    /// Name of its lease at D.
    pub request_id: String,
    /// Tokens of the prompt D held.
    pub held: Tokens,
    /// Tokens that came from a backup.
    pub restored: Tokens,
    /// Tokens a P computed.
    pub computed_p: Tokens,
    /// Tokens D computed.
    pub computed_d: Tokens,
    /// Tokens of KV that travelled to D.
    pub moved: Tokens,
    /// Left a D that held at least half of its context.
    pub abandoned: bool,
    /// When the first token reached the client.
    pub first_token: u64,
    /// What P's ledger counts as its backlog for this job.
    pub backlog: Tokens,
    /// 429 answers so far.
    pub refusals: u32,
    /// Whole length P was given credit for, when the rung uses P.
    pub held_p: Tokens,
}

impl Job {
    /// Whole length of the session after the turn.
    pub fn length(&self) -> Tokens {
        self.input + self.output
    }
}
