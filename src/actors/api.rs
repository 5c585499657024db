//! What the actors offer to the rooms above them: ask for a placement, get a grant, say how it ended.

use std::sync::Arc;

use super::slot::Role;

pub use crate::core::turn::Failure;
use crate::core::turn::Refused;
use crate::core::types::{BlockHash, Mode, Rung, SessionId, StopKind, Tokens, WorkerId};
use crate::wire::admit::Lease;
use crate::wire::plan::SyncTarget;

/// A turn to place: what `sessions` found out about a request.
#[derive(Debug, Clone)]
pub struct TurnRequest {
    /// `s(r)`.
    pub session: SessionId,
    /// `t(r)`.
    pub turn: u32,
    /// `prefix_hashes(r)`: the hashes of all whole blocks of the prompt.
    pub chain: Arc<[BlockHash]>,
    /// `input_len(r)` in tokens.
    pub input_len: Tokens,
    /// `append_len(r)` in tokens against the lane's last commit.
    pub append_len: Tokens,
    /// The request's own limit on output tokens.
    pub max_output: Option<Tokens>,
    /// A side request: no pin, no residency.
    pub one_shot: bool,
    /// Name of the D it says it was at; counts when nothing better is known.
    pub hint: Option<Arc<str>>,
    /// Record the decision for `x-kvc-explain`.
    pub explain: bool,
}

/// Where a worker is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRef {
    /// Its id in the fleet.
    pub id: WorkerId,
    /// P or D.
    pub role: Role,
    /// Its name: `x-kvc-worker`, metrics, logs.
    pub name: Arc<str>,
    /// Base URL without a trailing slash, e.g. `http://10.0.0.7:8101`.
    pub url: Arc<str>,
    /// `host:port` of its P→D listener (builtin nodes).
    pub kv_addr: Option<Arc<str>>,
}

/// How a turn is to be executed.
#[derive(Debug, Clone)]
pub struct DispatchPlan {
    /// Id of this attempt: the lease's id, the transfer's id, `x-request-id` at the workers.
    pub request_id: String,
    /// `s(r)`.
    pub session: SessionId,
    /// No residency is left behind.
    pub one_shot: bool,
    /// Direct, Seed, Reseed, Fallback.
    pub mode: Mode,
    /// Which rung of the ladder computes what is missing.
    pub rung: Rung,
    /// The D.
    pub decode: WorkerRef,
    /// The P; present exactly when the rung uses one (`restore`: the one with the backup).
    pub prefill: Option<WorkerRef>,
    /// Blocks of the chain that D holds and reuses.
    pub reuse_blocks: u32,
    /// D's reservation; absent for a Fallback.
    pub lease: Option<Lease>,
    /// `restore`: blocks of the chain, behind `reuse_blocks`, that the P sends.
    pub restore_blocks: u32,
    /// Where D pushes the session's KV to.
    pub sync: Vec<SyncTarget>,
    /// The engine's own slot for the session, where it has fixed ones.
    pub slot: Option<u32>,
    /// How many times this turn was re-placed after a failure.
    pub replaced: u32,
}

/// How a turn ended at its worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TurnResult {
    /// From `usage`.
    pub prompt_tokens: Option<Tokens>,
    /// From `usage`.
    pub completion_tokens: Option<Tokens>,
    /// From `usage`.
    pub cached_tokens: Option<Tokens>,
    /// From the finish reason.
    pub stop: StopKind,
}

/// A turn that will not be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status: 413, 429, 503.
    pub status: u16,
    /// Stable machine-readable code, e.g. `no_capacity`.
    pub code: &'static str,
    /// For people; names no internal address.
    pub message: String,
    /// `Retry-After` in seconds.
    pub retry_after: Option<u32>,
}

/// The answer to a turn of a session that has too many already.
pub(super) fn session_busy() -> Refusal {
    Refusal {
        status: 429,
        code: "session_busy",
        message: "this session has too many turns running already".into(),
        retry_after: Some(1),
    }
}

/// The answer to a turn the machine refuses.
pub(super) fn refusal(why: Refused) -> Refusal {
    let (status, code, message, retry_after) = match why {
        Refused::TooLarge => {
            (413, "prompt_too_large", "the prompt is larger than any worker's KV pool", None)
        }
        Refused::NoCapacity => (429, "no_capacity", "every worker is full of running turns", Some(2)),
        Refused::Busy => (429, "workers_busy", "the workers answered that they are busy", Some(2)),
        Refused::Unsettled => {
            (503, "unsettled", "the workers changed under every placement, try again", Some(1))
        }
        Refused::NoPrefill => {
            (503, "no_prefill", "no prefill worker can be reached, and these engines need one", Some(1))
        }
        Refused::NoWorkers => (503, "no_workers", "no decode worker can be reached", Some(1)),
    };
    Refusal { status, code, message: message.into(), retry_after }
}
