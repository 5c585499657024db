//! Flags over settings, shared by all commands.

use std::path::PathBuf;

use clap::Args;

use crate::settings::{Layers, Loaded, Settings, SettingsError};

/// Flags over settings. Each is the same as its key in a file; the long aliases are the reference's names.
#[derive(Debug, Clone, Default, Args)]
pub struct SettingsArgs {
    /// Settings file (TOML).
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Any setting, e.g. `--set http.workers=2`; repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// `production` or `paper`.
    #[arg(long)]
    pub preset: Option<String>,
    /// host:port of the gateway.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Kind of the workers: `builtin`, `vllm`, `sglang` or `openai`.
    #[arg(long, value_name = "KIND")]
    pub engine: Option<String>,
    /// KV pool of each engine in tokens, where it does not say so itself.
    #[arg(long, value_name = "TOKENS")]
    pub k_d: Option<String>,
    /// Base URL of a prefill worker; repeatable, or separated by commas.
    #[arg(long, value_name = "URL")]
    pub prefill: Vec<String>,
    /// Base URL of a decode worker; repeatable, or separated by commas.
    #[arg(long, value_name = "URL")]
    pub decode: Vec<String>,
    /// Longest append, in tokens, that a session's worker computes itself.
    #[arg(long, alias = "kvcache-direct-max-uncached-tokens", value_name = "TOKENS")]
    pub tau_append: Option<String>,
    /// Rejects after which a worker is avoided for a session.
    #[arg(long, alias = "kvcache-migration-reject-threshold", value_name = "N")]
    pub tau_reject: Option<String>,
    /// Push KV back to prefill workers.
    #[arg(long)]
    pub enable_d2p_sync: bool,
    /// Tokens a backup may lag behind; 0 or `inf`.
    #[arg(long, value_name = "TOKENS")]
    pub d2p_staleness_budget_tokens: Option<String>,
    /// Smallest batch worth a sync.
    #[arg(long, value_name = "TOKENS")]
    pub d2p_sync_batch_min_tokens: Option<String>,
    /// `last_p`, `round_robin` or `broadcast`.
    #[arg(long, value_name = "POLICY")]
    pub d2p_sync_target_policy: Option<String>,
}

impl SettingsArgs {
    /// Settings from these flags, the file they name and the environment.
    ///
    /// # Errors
    /// The first problem, in one line.
    pub fn load(&self) -> Result<Loaded, SettingsError> {
        let utf8 = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Settings::load(&Layers {
            file: self.config.clone(),
            env: std::env::vars_os().filter_map(utf8).collect(),
            flags: self.flags()?,
            enable_d2p: self.enable_d2p_sync,
        })
    }

    /// The flags as `(section.key, value)`; the named ones win over `--set`.
    fn flags(&self) -> Result<Vec<(String, String)>, SettingsError> {
        let mut flags = Vec::new();
        for set in &self.set {
            let (key, value) = set.split_once('=').ok_or_else(|| SettingsError::Value {
                key: "--set".into(),
                value: format!("{set:?}"),
                origin: "command line".into(),
                allowed: "SECTION.KEY=VALUE".into(),
            })?;
            flags.push((key.trim().to_owned(), value.trim().to_owned()));
        }
        let list = |urls: &Vec<String>| (!urls.is_empty()).then(|| urls.join(","));
        let named = [
            ("algorithm.preset", self.preset.clone()),
            ("http.listen", self.listen.clone()),
            ("fleet.engine", self.engine.clone()),
            ("fleet.k_d", self.k_d.clone()),
            ("fleet.prefill", list(&self.prefill)),
            ("fleet.decode", list(&self.decode)),
            ("algorithm.tau_append", self.tau_append.clone()),
            ("algorithm.tau_reject", self.tau_reject.clone()),
            ("algorithm.d2p_staleness_budget_tokens", self.d2p_staleness_budget_tokens.clone()),
            ("algorithm.d2p_sync_batch_min_tokens", self.d2p_sync_batch_min_tokens.clone()),
            ("algorithm.d2p_sync_target_policy", self.d2p_sync_target_policy.clone()),
        ];
        flags.extend(named.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn settings(args: &[&str]) -> Result<Settings, SettingsError> {
        #[derive(Parser)]
        struct Only {
            #[command(flatten)]
            args: SettingsArgs,
        }
        let parsed = Only::try_parse_from([&["kvc-router"], args].concat()).unwrap();
        Ok(Settings::load(&Layers {
            flags: parsed.args.flags()?,
            enable_d2p: parsed.args.enable_d2p_sync,
            ..Layers::default()
        })?
        .settings)
    }

    #[test]
    fn the_references_names_are_understood() {
        let s = settings(&[
            "--kvcache-direct-max-uncached-tokens=100",
            "--kvcache-migration-reject-threshold",
            "7",
            "--enable-d2p-sync",
            "--d2p-staleness-budget-tokens=inf",
            "--d2p-sync-batch-min-tokens=48",
            "--d2p-sync-target-policy=broadcast",
            "--decode=http://a:1,http://b:2",
            "--decode=http://c:3",
            "--set",
            "http.workers=2",
        ])
        .unwrap();
        assert_eq!((s.options.tau_append, s.options.tau_reject), (100, 7));
        assert_eq!(s.options.d2p_staleness_budget_tokens, None);
        assert_eq!(s.options.d2p_sync_batch_min_tokens, 48);
        assert_eq!(s.options.d2p_sync_target_policy, crate::core::options::D2pTarget::Broadcast);
        assert_ne!(s.options.d2p_trigger, crate::core::options::D2pTrigger::Off);
        assert_eq!((s.fleet.decode.len(), s.http.workers), (3, 2));
    }

    #[test]
    fn bad_flags_are_named() {
        let error = settings(&["--set", "x"]).unwrap_err().to_string();
        assert_eq!(error, "command line: `--set = \"x\"` is not allowed: SECTION.KEY=VALUE");
        let error = settings(&["--set", "http.lisen=a:1"]).unwrap_err().to_string();
        assert!(error.ends_with("did you mean `http.listen`?"), "{error}");
        let error = settings(&["--tau-append", "many"]).unwrap_err().to_string();
        assert!(error.contains("`algorithm.tau_append = \"many\"`"), "{error}");
    }
}
