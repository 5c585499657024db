//! API keys: who may ask, and how much at once. Only hashes are kept; the key itself is with whoever uses it.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// The SHA-256 of a key.
pub type KeyHash = [u8; 32];

/// One key, as a line: `NAME SHA256 [inflight=N] [rpm=N] [admin]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Its name, for logs and metrics; not secret.
    pub name: String,
    /// What it hashes to.
    pub sha256: KeyHash,
    /// Requests at once, ≥ 1; `None` = as many as the gateway takes.
    pub max_inflight: Option<usize>,
    /// Requests per minute, ≥ 1; `None` = any number.
    pub per_minute: Option<u32>,
    /// Whether it opens `/admin` and `/metrics`.
    pub admin: bool,
}

impl ApiKey {
    /// The hash of a key.
    pub fn hash(key: &[u8]) -> KeyHash {
        Sha256::digest(key).into()
    }

    /// The keys of a file: one a line; empty lines and lines that begin with `#` say nothing.
    ///
    /// # Errors
    /// Which line, and what is wrong with it.
    pub fn parse_file(text: &str) -> Result<Vec<Self>, String> {
        let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
        let keys = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        keys.map(|(i, line)| line.parse().map_err(|e| format!("line {i}: {e}"))).collect()
    }
}

impl fmt::Display for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.name)?;
        self.sha256.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        if let Some(n) = self.max_inflight {
            write!(f, " inflight={n}")?;
        }
        if let Some(n) = self.per_minute {
            write!(f, " rpm={n}")?;
        }
        f.write_str(if self.admin { " admin" } else { "" })
    }
}

impl FromStr for ApiKey {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let (Some(name), Some(hash)) = (words.next(), words.next()) else {
            return Err("a key is `NAME SHA256 [inflight=N] [rpm=N] [admin]`".into());
        };
        // Never quoted: somebody may have put the key itself here.
        let sha256 = unhex(hash).ok_or_else(|| {
            format!("the second word of key `{name}` must be its SHA-256 in 64 hex digits (`kvc-router key`)")
        })?;
        let mut key =
            Self { name: name.to_owned(), sha256, max_inflight: None, per_minute: None, admin: false };
        for word in words {
            let bad = || format!("key `{name}`: `{word}` is not `inflight=N`, `rpm=N` or `admin` (N >= 1)");
            match word.split_once('=') {
                None if word == "admin" => key.admin = true,
                Some(("inflight", n)) => key.max_inflight = Some(count(n).ok_or_else(bad)? as usize),
                Some(("rpm", n)) => key.per_minute = Some(count(n).ok_or_else(bad)?),
                _ => return Err(bad()),
            }
        }
        Ok(key)
    }
}

fn count(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n| *n >= 1)
}

fn unhex(text: &str) -> Option<KeyHash> {
    let mut hash = [0; 32];
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_back_the_same() {
        let key = ApiKey {
            name: "team-a".into(),
            sha256: ApiKey::hash(b"secret"),
            max_inflight: Some(8),
            per_minute: Some(600),
            admin: true,
        };
        let line = key.to_string();
        assert_eq!(
            line,
            "team-a 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b inflight=8 rpm=600 admin"
        );
        assert_eq!(line.parse(), Ok(key));
        let file = format!("# keys\n\n  {line}\n{line}");
        assert_eq!(ApiKey::parse_file(&file).unwrap().len(), 2);
    }

    #[test]
    fn a_bad_line_is_told_without_the_key() {
        let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
        for bad in ["a", "a kvc-secret", &format!("a +{}", &hash[1..])] {
            let error = ApiKey::parse_file(bad).unwrap_err();
            assert!(error.starts_with("line 1: ") && !error.contains("secret"), "{error}");
        }
        for bad in ["inflight=0", "rpm=x", "rpm", "root"] {
            let error = format!("a {hash} {bad}").parse::<ApiKey>().unwrap_err();
            assert!(error.contains(bad) && error.contains("N >= 1"), "{error}");
        }
    }
}
