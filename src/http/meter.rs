//! One request's accounts: counted once, whatever ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use super::errors::{ApiError, CLIENT_GONE};
use crate::telemetry;

/// How the requests of one gateway ended so far.
#[derive(Debug, Default)]
pub struct Tally {
    running: AtomicU64,
    served: AtomicU64,
    rejected: AtomicU64,
    failed: AtomicU64,
}

/// How requests ended so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Totals {
    /// Being served.
    pub running: u64,
    /// Served to their end.
    pub served: u64,
    /// Told that there is no room.
    pub rejected: u64,
    /// Everything else: errors of workers and clients, clients that left.
    pub failed: u64,
}

impl Tally {
    /// The counts of the moment.
    pub fn totals(&self) -> Totals {
        Totals {
            running: self.running.load(Relaxed),
            served: self.served.load(Relaxed),
            rejected: self.rejected.load(Relaxed),
            failed: self.failed.load(Relaxed),
        }
    }
}

/// Counts its request when dropped.
#[derive(Debug)]
pub(super) struct Meter {
    tally: Arc<Tally>,
    arrived: Instant,
    outcome: &'static str,
    reason: &'static str,
}

impl Meter {
    /// A request arrives. Until told otherwise it ends because its client left.
    pub fn begin(tally: &Arc<Tally>) -> Self {
        telemetry::inflight(true);
        tally.running.fetch_add(1, Relaxed);
        Self { tally: tally.clone(), arrived: Instant::now(), outcome: "failed", reason: CLIENT_GONE }
    }

    /// How the request ends.
    pub fn ends(&mut self, outcome: &'static str, reason: &'static str) {
        (self.outcome, self.reason) = (outcome, reason);
    }

    /// The gateway answers with an error of its own.
    pub fn fails(&mut self, error: &ApiError) {
        self.ends(if error.is_rejection() { "rejected" } else { "failed" }, error.code);
    }

    /// The answer's first byte is there.
    pub fn first_byte(&self, outcome: &'static str) {
        telemetry::first_byte(outcome, self.arrived.elapsed());
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        telemetry::inflight(false);
        telemetry::request_ended(self.outcome, self.reason);
        self.tally.running.fetch_sub(1, Relaxed);
        let count = match self.outcome {
            "rejected" => &self.tally.rejected,
            "failed" => &self.tally.failed,
            _ => &self.tally.served,
        };
        count.fetch_add(1, Relaxed);
    }
}
