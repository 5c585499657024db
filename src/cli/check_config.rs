//! `kvc-router check-config FILE`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::{Exit, SettingsArgs, bad_input};

/// Print the effective settings, or what is wrong with them.
#[derive(Debug, Args)]
pub struct CheckConfig {
    /// Settings file (TOML); without it, the defaults.
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl CheckConfig {
    pub(super) fn run(mut self) -> Exit {
        self.settings.config = self.file.take().or(self.settings.config);
        match self.settings.load() {
            Ok(loaded) => {
                // A reader that left early (`| head`) is no failure.
                let _ = std::io::stdout().write_all(loaded.to_toml().as_bytes());
                Exit::Ok
            }
            Err(problem) => bad_input(problem),
        }
    }
}
