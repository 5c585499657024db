//! Recorded traffic: sessions of turns, whatever file they came from. Times are µs, lengths tokens.

mod chain;
mod mooncake;
mod sessions;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::core::types::{StopKind, Tokens};

pub use chain::{Chain, SharedPrefix, with_answer};

/// Longest think time that is replayed: longer pauses are cut to it (AgentX rules).
pub const IDLE_CAP_US: u64 = 300_000_000;

/// One request of a session.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnSpec {
    /// Recorded start.
    pub at: u64,
    /// Prompt tokens.
    pub input: Tokens,
    /// Answer tokens, at least 1.
    pub output: Tokens,
    /// Client think time after the previous answer.
    pub gap: u64,
    /// How this turn's answer stopped.
    pub stop: StopKind,
    /// Run-length list of its block ids: `(first, count)`.
    pub runs: Vec<(u64, u32)>,
}

/// One growing prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionSpec {
    /// Its name in the file.
    pub name: String,
    /// Sub-agents: index of the parent in [`Trace::sessions`] and the parent's turn that starts it.
    pub parent: Option<(usize, usize)>,
    /// Sub-agents: from the start of the parent's turn to the first request.
    pub delay: u64,
    /// Scope of its block ids: a sub-agent shares its parent's.
    pub family: u64,
    /// Who shares its system prefix.
    pub group: u64,
    /// Length of that prefix in tokens.
    pub shared_prefix: Tokens,
    /// Its requests, in order; at least one.
    pub turns: Vec<TurnSpec>,
}

/// A file's worth of traffic.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// Name for reports.
    pub name: String,
    /// Tokens per recorded block.
    pub block: u32,
    /// The sessions; parents before or after their sub-agents.
    pub sessions: Vec<SessionSpec>,
}

impl Trace {
    /// Reads files (`*.sessions.jsonl[.gz]` or Mooncake JSONL, told apart by their fields) into one trace.
    ///
    /// # Errors
    /// The file, line and field that is wrong.
    pub fn read<P: AsRef<Path>>(files: &[P]) -> Result<Self, String> {
        let mut all = Self::default();
        for file in files {
            let one = read_file(file.as_ref()).map_err(|e| format!("{}: {e}", file.as_ref().display()))?;
            if all.block != 0 && all.block != one.block {
                return Err(format!(
                    "{}: blocks of {} and {} tokens do not mix",
                    one.name, one.block, all.block
                ));
            }
            all.block = one.block;
            all.name = if all.name.is_empty() { one.name } else { format!("{}+{}", all.name, one.name) };
            let offset = all.sessions.len();
            all.sessions.extend(one.sessions.into_iter().map(|mut s| {
                s.parent = s.parent.map(|(p, turn)| (p + offset, turn));
                s
            }));
        }
        if all.sessions.is_empty() {
            return Err("no trace file given".into());
        }
        Ok(all)
    }

    /// Requests in the file.
    pub fn turns(&self) -> usize {
        self.sessions.iter().map(|s| s.turns.len()).sum()
    }
}

fn read_file(path: &Path) -> Result<Trace, String> {
    let file = File::open(path).map_err(|e| e.to_string())?;
    let mut head = BufReader::new(file);
    let zipped = head.fill_buf().map_err(|e| e.to_string())?.starts_with(&[0x1f, 0x8b]);
    let mut text = String::new();
    let read = if zipped {
        MultiGzDecoder::new(head).read_to_string(&mut text)
    } else {
        head.read_to_string(&mut text)
    };
    read.map_err(|e| format!("line {}: cannot be read: {e}", text.lines().count() + 1))?;
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let name =
        name.trim_end_matches(".gz").trim_end_matches(".jsonl").trim_end_matches(".sessions").to_owned();
    parse(&name, &text)
}

/// Parses the text of one file.
///
/// # Errors
/// The line and field that is wrong.
pub fn parse(name: &str, text: &str) -> Result<Trace, String> {
    let lines = || text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()).map(|(i, l)| (i + 1, l));
    let Some((_, first)) = lines().next() else { return Err("the file holds no request".into()) };
    let mut trace =
        if first.contains("\"hash_ids\"") { mooncake::parse(lines())? } else { sessions::parse(lines())? };
    trace.name = name.to_owned();
    Ok(trace)
}

/// Parses one line, naming the field that is wrong.
fn line<'a, T: serde::Deserialize<'a>>(number: usize, text: &'a str) -> Result<T, String> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        let field = if path == "." { String::new() } else { format!("field `{path}`: ") };
        format!("line {number}: {field}{}", e.inner())
    })?;
    json.end().map_err(|e| format!("line {number}: {e}"))?;
    Ok(value)
}

/// A non-negative time in units of `unit` µs.
fn micros(value: f64, unit: f64) -> Option<u64> {
    const YEAR: f64 = 3.2e13;
    let us = value * unit;
    (us.is_finite() && (0.0..=YEAR).contains(&us)).then_some(us.round() as u64)
}

/// No prompt or answer is longer.
const MAX_TOKENS: Tokens = 100_000_000;
/// Or has more blocks.
const MAX_BLOCKS: u64 = 4_000_000;

#[cfg(test)]
mod tests;
