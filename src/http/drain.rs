//! How a gateway ends: first it says that it is not ready and goes on accepting, so that load balancers turn away; then
//! its listener closes and running turns finish; what is left after that is cut.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Gateway;
use super::live::Live;
use super::meter::Totals;
use super::server::Serving;

/// Longest wait for the last leases to go back.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How it ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// From the signal to the end.
    pub took: Duration,
    /// Requests that ran when the listener closed.
    pub running: u64,
    /// Of these: finished by themselves.
    pub finished: u64,
    /// Of these: cut.
    pub cut: u64,
    /// Turns whose leases could not be returned; they expire.
    pub unreturned: usize,
    /// All requests since the start.
    pub totals: Totals,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { took, running, finished, cut, unreturned, totals } = self;
        write!(
            f,
            "stopped in {:.1} s: {running} requests were running, {finished} finished, {cut} cut, {unreturned} leases not \
             returned; since the start {} served, {} rejected, {} failed",
            took.as_secs_f64(),
            totals.served,
            totals.rejected,
            totals.failed
        )
    }
}

impl Gateway<Live> {
    /// Serves until `told` (a signal) ends, then drains as the settings say; `again` (a second signal) cuts it short.
    /// The actors are stopped at the end.
    pub async fn run(
        &self,
        serving: Serving,
        told: impl Future<Output = ()>,
        again: impl Future<Output = ()>,
    ) -> std::io::Result<Report> {
        let Serving { mut server, .. } = serving;
        let handle = server.handle();
        tokio::select! {
            ended = &mut server => {
                ended?;
                return Ok(self.ends(Instant::now(), self.totals()).await);
            }
            () = told => {}
        }
        let began = Instant::now();
        self.backend.drain();
        tracing::info!(running = self.totals().running, "told to stop");
        let mut again = std::pin::pin!(again);
        let delay = Duration::from_secs(self.http().drain_delay_s);
        let mut hurried = tokio::select! {
            ended = &mut server => { ended?; true }
            () = tokio::time::sleep(delay) => false,
            () = &mut again => true,
        };
        let before = self.totals();
        if !hurried {
            let limit = Duration::from_secs(self.http().drain_s);
            // Closes the listener and connections at rest; the others after what runs on them.
            let stopping = handle.stop(true);
            let stopped = async { tokio::join!(stopping, &mut server).1 };
            hurried = tokio::select! {
                ended = timeout(limit, stopped) => ended.is_err(),
                () = &mut again => true,
            };
        }
        let at_end = self.totals();
        // What still runs is cut with its connection.
        drop(server);
        let mut report = self.ends(began, before).await;
        report.cut = if hurried { at_end.running } else { 0 };
        report.finished = report.running.saturating_sub(report.cut);
        Ok(report)
    }

    async fn ends(&self, began: Instant, before: Totals) -> Report {
        let turns = self.backend.turns();
        let unreturned = turns.settled(LAST_WORDS).await;
        let counted = async {
            while self.totals().running > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let _ = timeout(LAST_WORDS, counted).await;
        turns.stop().await;
        Report {
            took: began.elapsed(),
            running: before.running,
            finished: before.running,
            cut: 0,
            unreturned,
            totals: self.totals(),
        }
    }
}
