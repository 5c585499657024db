//! The engine's tokenizer, and where a text may be cut without changing its tokens.

use std::path::Path;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

/// A `tokenizer.json`.
pub struct Tokenizer {
    inner: fastokens::Tokenizer,
    /// Finds the added tokens that stand in the raw text, the leftmost longest first, as the tokenizer does.
    added: AhoCorasick,
    /// For each of them: whether a cut before it is safe.
    clean: Vec<bool>,
    /// For each of them: whether it counts only between things that are no words.
    single: Vec<bool>,
    /// Length of the longest in bytes: how far behind a cut the text decides about it.
    reach: usize,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokenizer")
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// A sentence: it cannot be read, or is of a kind that is not known.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let json: Value = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        Self::from_json(json).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// A tokenizer from its JSON.
    ///
    /// # Errors
    /// A sentence: it is of a kind that is not known.
    pub fn from_json(mut json: Value) -> Result<Self, String> {
        if let Some(fields) = json.as_object_mut() {
            // They belong to batches for training, not to a prompt.
            fields.insert("truncation".into(), Value::Null);
            fields.insert("padding".into(), Value::Null);
        }
        let inner = fastokens::Tokenizer::from_json(json).map_err(|e| e.to_string())?;
        let raw: Vec<_> = inner.added_token_configs().iter().filter(|token| !token.normalized).collect();
        let added = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|token| &token.content))
            .map_err(|e| e.to_string())?;
        let clean = raw.iter().map(|token| !token.lstrip && !token.single_word).collect();
        let single = raw.iter().map(|token| token.single_word).collect();
        let reach = raw.iter().map(|token| token.content.len()).max().unwrap_or(0);
        Ok(Self { inner, added, clean, single, reach })
    }

    /// The ids of a text in which special tokens count as such, nothing added at its ends.
    ///
    /// # Errors
    /// A sentence: the tokenizer fails on it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.inner.encode(text).map_err(|e| e.to_string())
    }

    /// The ids of a bare prompt, with what the tokenizer puts at its ends.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_bare(&self, text: &str) -> Result<Vec<u32>, String> {
        self.inner.encode_with_special_tokens(text, true).map_err(|e| e.to_string())
    }

    /// Places behind `from` (itself such a place, or 0) where a text may be cut: the ids of the whole are those of
    /// its pieces. They are where an added token begins that takes nothing of what stands before it: tokenizers
    /// split there before they do anything else.
    pub fn cuts<'t>(&'t self, text: &'t str, from: usize) -> impl Iterator<Item = usize> + 't {
        let rest = text.get(from..).unwrap_or_default();
        // Behind a token that counts only sometimes, the scan may stand elsewhere than the tokenizer's.
        let certain = self.added.find_iter(rest).take_while(|found| !self.single[found.pattern()]);
        certain
            .filter(|found| self.clean[found.pattern()] && found.start() > 0)
            .map(move |found| from + found.start())
    }

    /// Bytes behind a cut that decide whether it is one.
    pub fn reach(&self) -> usize {
        self.reach
    }
}
