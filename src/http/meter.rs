//! One request's accounts: counted once, whatever ends it.

use std::time::Instant;

use super::errors::{ApiError, CLIENT_GONE};
use crate::telemetry;

/// Counts its request when dropped.
#[derive(Debug)]
pub(super) struct Meter {
    arrived: Instant,
    outcome: &'static str,
    reason: &'static str,
}

impl Meter {
    /// A request arrives. Until told otherwise it ends because its client left.
    pub fn begin() -> Self {
        telemetry::inflight(true);
        Self { arrived: Instant::now(), outcome: "failed", reason: CLIENT_GONE }
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
    }
}
