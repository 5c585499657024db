//! The words of the turn machine: what it is told and what it says.

use serde::{Deserialize, Serialize};

use super::super::admit::AdmitTerms;
use super::super::route::{Candidate, Choice, PrefillView};
use super::super::types::{Mode, RejectReason, Rung, Tokens, WorkerId};

/// What the machine is told.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// The turn arrived.
    Begin,
    /// Answer to [`Command::Gather`].
    Fleet {
        /// D workers that are up and not draining.
        decode: &'a [Candidate],
        /// P workers that are up.
        prefill: &'a [PrefillView],
    },
    /// Answer to [`Command::Admit`].
    Answer(Answer),
    /// Answer to [`Command::PickPrefill`]. `None`: no P is up.
    Prefill(Option<WorkerId>),
    /// Answer to [`Command::PickFallback`].
    FallbackPair {
        /// Line 26; `None` without P workers.
        prefill: Option<WorkerId>,
        /// Line 27.
        decode: WorkerId,
    },
    /// The wait queue says room was freed somewhere.
    RoomFreed,
    /// The wait queue is full, or the turn's deadline in it passed.
    WaitOver,
    /// The dispatched turn failed before any byte reached the client.
    Failed(Failure),
    /// The dispatched turn is complete.
    Finished {
        /// D reports that it holds the session now.
        resident: bool,
    },
    /// The client is gone, or the turn failed beyond repair.
    Cancelled,
}

/// A D's answer to an Admit RPC.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Answer {
    /// `can_admit = true`; the D holds a lease (or, with `reserve = check`, a promise).
    Admitted {
        /// Direct, Seed or Reseed.
        mode: Mode,
        /// Blocks of the chain D holds.
        reuse_blocks: u32,
        /// What D decided from, when it said so.
        terms: Option<AdmitTerms>,
    },
    /// `can_admit = false`.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What D decided from, when it said so.
        terms: Option<AdmitTerms>,
    },
    /// No answer in time. Not a reject: asked once more under the same id.
    Silent,
    /// Connect failure, or a node that is not itself any more.
    Unreachable,
}

/// Why a dispatched turn has to be placed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The D could not be connected to, or closed before it began.
    DecodeUnreachable,
    /// The P could not be connected to, or failed before anything was computed.
    PrefillUnreachable,
    /// The P answered that it is busy (429, 503).
    PrefillBusy,
    /// D no longer holds what the plan relied on (409).
    PlanMismatch,
    /// D answered 429: it is busy.
    Busy,
}

/// What the driver has to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Command {
    /// Collect score answers and P loads; then [`Event::Fleet`].
    Gather,
    /// Ask for admission; then [`Event::Answer`]. The same `attempt` is the same request id.
    Admit {
        /// `d*`.
        worker: WorkerId,
        /// Numbers the request ids of this turn.
        attempt: u32,
    },
    /// Line 15: choose a P; then [`Event::Prefill`].
    PickPrefill,
    /// Lines 26-27, blind round robin; then [`Event::FallbackPair`].
    PickFallback,
    /// Enter the wait queue; then [`Event::RoomFreed`] or [`Event::WaitOver`].
    Wait {
        /// Tokens to compute: the queue serves the shortest first.
        work: Tokens,
    },
    /// Count the turn at D (lines 10 and D4) and execute it; then `Failed`, `Finished` or `Cancelled`.
    Dispatch(Dispatch),
    /// Give back what an attempt may have reserved.
    Release {
        /// The D.
        worker: WorkerId,
        /// The attempt.
        attempt: u32,
    },
    /// Answer the client with an error; the turn is over.
    Refuse(Refused),
}

/// How to execute a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispatch {
    /// Direct, Seed, Reseed, Fallback.
    pub mode: Mode,
    /// What computes the missing tokens.
    pub rung: Rung,
    /// The D.
    pub decode: WorkerId,
    /// The P, when the rung uses one: it computes, or (`restore`) sends its backup.
    pub prefill: Option<WorkerId>,
    /// Blocks D holds and reuses.
    pub reuse_blocks: u32,
    /// Whether D admitted it (not a Fallback).
    pub admitted: bool,
    /// Names the request id.
    pub attempt: u32,
}

/// Why a turn is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refused {
    /// No D could hold it even when empty: 413.
    TooLarge,
    /// Every D is full of running turns: 429.
    NoCapacity,
    /// D workers answered busy: 429.
    Busy,
    /// No D is up, or none could be reached: 503.
    NoWorkers,
    /// The engines' D workers cannot compute a prompt themselves, and no P is up: 503.
    NoPrefill,
    /// It was placed again as often as allowed, and every plan failed before it began: 503.
    Unsettled,
}

/// One pass of Algorithm 3's loop, for `explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// What Route chose and from what.
    pub choice: Choice,
    /// What Admit answered; `None` while it is asked.
    pub answer: Option<Answer>,
}
