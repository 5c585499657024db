//! The words of the specification as types: workers, sessions, blocks, modes, reasons.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A length in tokens.
pub type Tokens = u64;

/// A point in time or a span in milliseconds of the injected clock. The core never reads a clock.
pub type Millis = u64;

/// A worker (P or D) of the fleet: its place in the order of registration.
/// Ties in every decision end at the lowest id (R1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// `s(r)`: one growing prompt, scoped by credential and model (`scope/key`). Cheap to clone, compared exactly.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// Wraps an id. The caller has validated it.
    pub fn new(id: impl AsRef<str>) -> Self {
        Self(Arc::from(id.as_ref()))
    }

    /// The whole id.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part a client may see: without the scope before the first `/`.
    pub fn public(&self) -> &str {
        self.0.split_once('/').map_or(&*self.0, |(_, key)| key)
    }
}

impl Borrow<str> for SessionId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One element of `H`: the hash of a block of the prompt *and of everything before it*.
/// Two equal hashes therefore mean two equal prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Hashes block hashes: they are random already, one multiplication spreads those of hand-made tests.
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockHashing;

/// See [`BlockHashing`].
#[derive(Debug, Clone, Copy, Default)]
pub struct BlockHasher(u64);

impl std::hash::BuildHasher for BlockHashing {
    type Hasher = BlockHasher;

    fn build_hasher(&self) -> BlockHasher {
        BlockHasher(0)
    }
}

impl std::hash::Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(self.0 ^ u64::from(*b)));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

/// `δ(r)` without its worker: how a turn is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// D holds the session and computes the append.
    Direct,
    /// First turn of a session: P prefills, the KV travels to D.
    Seed,
    /// The session was served before, but its KV is not (or not cheaply) on the chosen D.
    Reseed,
    /// No D admitted the turn: vanilla P/D.
    Fallback,
}

impl Mode {
    /// The lower-case name used in headers, metrics and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Seed => "seed",
            Self::Reseed => "reseed",
            Self::Fallback => "fallback",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where the missing tokens of a turn are computed and what travels: the rungs of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// D appends on its own KV (Direct).
    Append,
    /// Backup blocks travel from a P to D, D computes the rest.
    Restore,
    /// P resumes from its backup and sends the whole range.
    Backup,
    /// D keeps its prefix; P computes and sends only the missing range.
    Delta,
    /// D computes everything it lacks, in chunks beside its running decodes.
    Local,
    /// P computes what it lacks of the whole prompt and sends all D lacks.
    Full,
}

impl Rung {
    /// The lower-case name used as `reason` in headers, metrics and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Restore => "restore",
            Self::Backup => "backup",
            Self::Delta => "delta",
            Self::Local => "local",
            Self::Full => "full",
        }
    }

    /// Whether the rung occupies a P worker's prefill queue.
    pub const fn uses_prefill(self) -> bool {
        matches!(self, Self::Backup | Self::Delta | Self::Full)
    }
}

/// Why a D refused a turn (Algorithm 2). The strings are the specification's, exactly (A6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RejectReason {
    /// Line 7: the append is over `τ_append`.
    RealLargeAppend,
    /// Line 9: resident, but no room.
    NoDCapacity,
    /// Line 15: not resident and no room.
    SessionNotResidentNoCapacity,
}

impl RejectReason {
    /// The wire string.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RealLargeAppend => "real-large-append",
            Self::NoDCapacity => "no-d-capacity",
            Self::SessionNotResidentNoCapacity => "session-not-resident-no-capacity",
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why the previous turn of a session stopped: how soon it will be back, and so what eviction spares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum StopKind {
    /// The agent runs a tool and returns within seconds (p50 9 s on real traces).
    ToolUse,
    /// A person answers next, or nobody (p50 210 s).
    EndTurn,
    /// Not reported.
    #[default]
    Unknown,
}
