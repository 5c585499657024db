//! `kvc-router demo`, with builtin workers or a real model.

use clap::{Args, ValueEnum};

use super::{Exit, SettingsArgs, bad_input, failure};
use crate::demo::{self, Mode};

/// Gateway, workers and real agent sessions in one process.
#[derive(Debug, Default, Args)]
pub struct Demo {
    /// Where the worker nodes run.
    #[arg(long, value_enum, default_value_t = Nodes::Inside)]
    nodes: Nodes,
    /// A real model instead of the builtin workers: llama.cpp's server and a small chat model from PyPI.
    #[arg(long, value_enum, conflicts_with = "nodes")]
    model: Option<Model>,
    /// End after the report instead of serving on.
    #[arg(long)]
    exit: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: SettingsArgs,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Nodes {
    /// In this process.
    #[default]
    Inside,
    /// One child process each.
    Processes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Model {
    /// SmolLM2-135M-Instruct.
    Smollm2,
}

impl Demo {
    pub(super) fn run(self) -> Exit {
        let settings = match self.settings.load() {
            Ok(loaded) => loaded.settings,
            Err(problem) => return bad_input(problem),
        };
        crate::telemetry::install_logs("warn");
        let mode = Mode { processes: self.nodes == Nodes::Processes, exit: self.exit, json: self.json };
        let system = actix_web::rt::System::new();
        if self.model.is_some() {
            return match system.block_on(demo::model::run(settings, mode)) {
                Ok(()) => Exit::Ok,
                Err(problem @ demo::model::Error::Missing(_)) => bad_input(problem),
                Err(problem) => failure(problem),
            };
        }
        system.block_on(demo::run(settings, mode)).map_or_else(failure, |()| Exit::Ok)
    }
}
