//! `kvc-router key NAME`.

use std::io::Read as _;

use clap::Args;

use super::{Exit, bad_input};
use crate::settings::keys::ApiKey;

/// Make an API key: the key for its user, and the line for `http.keys` or the keys' file.
#[derive(Debug, Args)]
pub struct Key {
    /// Its name: letters, digits, `-`, `_`.
    name: String,
    /// Requests at once.
    #[arg(long, value_name = "N")]
    inflight: Option<usize>,
    /// Requests per minute.
    #[arg(long, value_name = "N")]
    rpm: Option<u32>,
    /// It also opens `/admin` and `/metrics`.
    #[arg(long)]
    admin: bool,
    /// Read the key from standard input instead of making one.
    #[arg(long)]
    stdin: bool,
}

impl Key {
    pub(super) fn run(self) -> Exit {
        let mut key = format!("kvc-{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        if self.stdin {
            let mut text = String::new();
            if let Err(problem) = std::io::stdin().take(4096).read_to_string(&mut text) {
                return bad_input(problem);
            }
            key = text.trim().to_owned();
        }
        match line(&self, &key) {
            Ok(line) => {
                if !self.stdin {
                    eprintln!("the key, shown only now:");
                    println!("{key}");
                    eprintln!("its line for http.keys or the keys' file:");
                }
                println!("{line}");
                Exit::Ok
            }
            Err(problem) => bad_input(problem),
        }
    }
}

fn line(args: &Key, key: &str) -> Result<String, String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if args.name.is_empty() || !args.name.bytes().all(plain) {
        return Err("a key's name is made of letters, digits, `-` and `_`".into());
    }
    if key.len() < 16 || key.len() > 512 || !key.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("a key has 16 to 512 visible ASCII characters".into());
    }
    if args.inflight == Some(0) || args.rpm == Some(0) {
        return Err("a limit is at least 1".into());
    }
    let (sha256, admin) = (ApiKey::hash(key.as_bytes()), args.admin);
    let key =
        ApiKey { name: args.name.clone(), sha256, max_inflight: args.inflight, per_minute: args.rpm, admin };
    Ok(key.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_one_the_settings_read() {
        let args = Key { name: "a".into(), inflight: Some(2), rpm: None, admin: true, stdin: false };
        let line = line(&args, "kvc-0123456789abcdef").unwrap();
        let key: ApiKey = line.parse().unwrap();
        assert_eq!((key.max_inflight, key.admin), (Some(2), true));
        assert_eq!(key.sha256, ApiKey::hash(b"kvc-0123456789abcdef"));
        assert!(!line.contains("0123456789abcdef"));
        for (name, key) in [("a b", "kvc-0123456789abcdef"), ("a", "short"), ("a", "kvc 0123456789abcdef")] {
            let args = Key { name: name.into(), inflight: None, rpm: None, admin: false, stdin: false };
            assert!(super::line(&args, key).is_err(), "{name} {key}");
        }
    }
}
