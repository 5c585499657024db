//! What the demo prints: the table of outcomes, or one JSON object.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::client::Played;
use crate::actors::sync_meter::SyncFigures;

/// The figures of a run.
#[derive(Debug, Default)]
pub struct Report {
    turns: Vec<Figures>,
    /// Requests that failed.
    pub errors: usize,
    /// Answers that differ from a single cold worker's.
    pub mismatched: usize,
    moves: usize,
    wall: Duration,
    sync: Option<SyncFigures>,
}

#[derive(Debug)]
struct Figures {
    mode: String,
    reason: String,
    ttft: Duration,
    prompt: u64,
    cached: u64,
}

const MODES: [&str; 5] = ["direct", "seed", "reseed", "fallback", "rejected"];

impl Report {
    /// From what the agents noted, session by session in order.
    pub fn new(sessions: &[Vec<Played>], errors: usize, mismatched: usize, wall: Duration) -> Self {
        let figures = |p: &Played| Figures {
            mode: p.mode.clone(),
            reason: p.reason.clone(),
            ttft: p.ttft,
            prompt: p.prompt_tokens,
            cached: p.cached_tokens,
        };
        let moved = |s: &Vec<Played>| s.windows(2).filter(|w| w[0].worker != w[1].worker).count();
        Self {
            turns: sessions.iter().flatten().map(figures).collect(),
            errors,
            mismatched,
            moves: sessions.iter().map(moved).sum(),
            wall,
            sync: None,
        }
    }

    /// Adds how D→P sync went.
    pub fn with_sync(self, sync: SyncFigures) -> Self {
        Self { sync: Some(sync), ..self }
    }

    fn of(&self, mode: &str) -> Vec<&Figures> {
        self.turns.iter().filter(|t| t.mode == mode).collect()
    }

    /// One JSON object.
    pub fn json(&self) -> String {
        let modes: BTreeMap<&str, usize> = MODES.iter().map(|m| (*m, self.of(m).len())).collect();
        let all: Vec<&Figures> = self.turns.iter().collect();
        let (p50, p99) = (ttft_ms(&all, 50), ttft_ms(&all, 99));
        serde_json::json!({
            "turns": self.turns.len(),
            "modes": modes,
            "errors": self.errors,
            "mismatched_outputs": self.mismatched,
            "ttft_ms": {"p50": p50, "p99": p99},
            "moves": self.moves,
            "d2p": self.sync,
        })
        .to_string()
    }

    /// A table for people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:<10}{:>7}{:>9}{:>13}{:>13}{:>9}",
            "mode", "turns", "share", "TTFT p50", "TTFT p99", "cached"
        );
        for mode in MODES {
            let turns = self.of(mode);
            self.row(&mut text, mode, &turns);
            let reasons: std::collections::BTreeSet<&str> = turns.iter().map(|t| &*t.reason).collect();
            for reason in reasons.iter().filter(|_| mode != "direct") {
                let these: Vec<_> = turns.iter().copied().filter(|t| t.reason == **reason).collect();
                self.row(&mut text, &format!("  {reason}"), &these);
            }
        }
        self.row(&mut text, "all", &self.turns.iter().collect::<Vec<_>>());
        let _ = writeln!(
            text,
            "{} moves, {} errors, {} outputs differ from a cold worker's; {:.0} s",
            self.moves,
            self.errors,
            self.mismatched,
            self.wall.as_secs_f64(),
        );
        if let Some(sync) = &self.sync {
            let _ = writeln!(
                text,
                "D→P: {} of {} reseeds from a backup, {} delta; {:.1}% synced before the next turn, staleness p50 {} \
                 p99 {} tokens, {} over β, {} against Theorem 4",
                sync.backup_hits,
                sync.reseeds,
                sync.delta,
                sync.synced_before_next_turn_pct,
                sync.staleness_p50,
                sync.staleness_p99,
                sync.beta_violations,
                sync.theorem4_violations,
            );
        }
        text
    }

    fn row(&self, text: &mut String, name: &str, turns: &[&Figures]) {
        let (prompt, cached) = turns.iter().fold((0, 0), |(p, c), t| (p + t.prompt, c + t.cached));
        let share = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
        let _ = writeln!(
            text,
            "{name:<10}{:>7}{:>8.1}%{:>10.1} ms{:>10.1} ms{:>8.1}%",
            turns.len(),
            share(turns.len(), self.turns.len()),
            ttft_ms(turns, 50),
            ttft_ms(turns, 99),
            share(cached as usize, prompt as usize),
        );
    }
}

/// Nearest-rank percentile of the time to the first token, in ms; 0 without turns.
fn ttft_ms(turns: &[&Figures], percent: usize) -> f64 {
    let mut times: Vec<Duration> = turns.iter().map(|t| t.ttft).collect();
    times.sort();
    let rank = (times.len() * percent).div_ceil(100).max(1) - 1;
    times.get(rank).map_or(0.0, |t| (t.as_secs_f64() * 1e5).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(mode: &str, worker: &str, ms: u64) -> Played {
        Played {
            turn: 0,
            mode: mode.into(),
            reason: "full".into(),
            worker: worker.into(),
            ttft: Duration::from_millis(ms),
            prompt_tokens: 100,
            cached_tokens: 50,
            body: bytes::Bytes::new(),
            text: String::new(),
        }
    }

    #[test]
    fn counts_percentiles_and_moves() {
        let sessions = [
            vec![played("seed", "d0", 100), played("direct", "d0", 1), played("reseed", "d1", 50)],
            vec![played("direct", "d2", 3)],
        ];
        let report = Report::new(&sessions, 2, 1, Duration::from_secs(3));
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        let expected = serde_json::json!({
            "turns": 4, "modes": {"direct": 2, "seed": 1, "reseed": 1, "fallback": 0, "rejected": 0},
            "errors": 2, "mismatched_outputs": 1, "ttft_ms": {"p50": 3.0, "p99": 100.0}, "moves": 1, "d2p": null,
        });
        assert_eq!(json, expected);
        assert!(report.table().contains("direct          2    50.0%"), "{}", report.table());
    }
}
