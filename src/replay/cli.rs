//! `kvc-router replay` and `kvc-router replay sweep`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::exec::{self, Unit};
use super::policy::{self, Policy};
use super::report::{self, Outcome, html};
use super::settings::{Arrival, Setting};
use super::sim::Control;
use super::sweep;
use super::trace::{SharedPrefix, Trace};
use crate::core::cost::CostModel;

/// Replays traces through the router's core and the policies of the field.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ReplayArgs {
    /// A whole map instead of one setting.
    #[command(subcommand)]
    pub command: Option<ReplayCommand>,
    /// One setting.
    #[command(flatten)]
    pub run: Option<RunArgs>,
}

/// Subcommands of replay.
#[derive(Debug, Clone, Subcommand)]
pub enum ReplayCommand {
    /// K_d × live sessions × policies: the knee and the map of who wins.
    Sweep(SweepArgs),
}

/// What every replay needs.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Trace files: *.sessions.jsonl[.gz] or Mooncake JSONL.
    #[arg(long, num_args = 1.., required = true)]
    pub trace: Vec<PathBuf>,
    /// Policies, comma-separated, or all.
    #[arg(long, default_value = "all")]
    pub policies: String,
    /// P workers; fused policies get as many workers as P and D together.
    #[arg(long, default_value_t = 1)]
    pub prefill: u32,
    /// D workers.
    #[arg(long, default_value_t = 3)]
    pub decode: u32,
    /// KV pool of each worker in tokens.
    #[arg(long, default_value_t = 92_104)]
    pub kv_tokens: u64,
    /// Host memory for KV in the whole fleet, in tokens: at the P nodes, or spread over fused workers.
    #[arg(long, default_value_t = 0)]
    pub host_tokens: u64,
    /// Tokens per block, a multiple of the trace's; the trace's when absent.
    #[arg(long)]
    pub block: Option<u32>,
    /// Live sessions.
    #[arg(long, default_value_t = 52)]
    pub sessions: u32,
    /// Closed loop of live sessions, or open loop by recorded times.
    #[arg(long, value_enum, default_value_t = Arrival::Closed)]
    pub arrival: Arrival,
    /// Factor on think times (closed) or recorded times (open).
    #[arg(long, default_value_t = 1.0)]
    pub time_scale: f64,
    /// Which sessions share their system prefix.
    #[arg(long, value_enum, default_value_t = SharedPrefix::Group)]
    pub shared_prefix: SharedPrefix,
    /// Cost model: reference, polynomial, or a TOML file with its figures.
    #[arg(long, default_value = "reference")]
    pub cost: String,
    /// First seed.
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Seeds to average over.
    #[arg(long, default_value_t = 1)]
    pub seeds: u32,
    /// Any option: KEY (of kvc), paper.KEY, cost.KEY, lab.KEY.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Runs at the same time; all cores when absent.
    #[arg(long)]
    pub jobs: Option<usize>,
    /// Write the report as JSON; - for standard output.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Write the report as a page of pictures.
    #[arg(long)]
    pub html: Option<PathBuf>,
}

/// A sweep.
#[derive(Debug, Clone, Args)]
pub struct SweepArgs {
    /// What the cells have in common.
    #[command(flatten)]
    pub run: RunArgs,
    /// K_d of the cells.
    #[arg(long, value_delimiter = ',', default_value = "92104,276000,553000,1100000")]
    pub kv_list: Vec<u64>,
    /// Live sessions of the cells.
    #[arg(long, value_delimiter = ',', default_value = "16,36,52")]
    pub session_list: Vec<u32>,
    /// Host memory of each cell as a multiple of its K_d (instead of --host-tokens).
    #[arg(long)]
    pub host_factor: Option<f64>,
    /// Keeps finished work: run again with the same file to go on.
    #[arg(long)]
    pub state: Option<PathBuf>,
}

/// Runs the command; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C (the report is partial then).
pub fn run(args: &ReplayArgs) -> i32 {
    // Lives as long as the process: the thread that waits for Ctrl-C holds it.
    let control: &'static Control = Box::leak(Box::default());
    exec::watch_interrupt(control);
    let ended = match (&args.command, &args.run) {
        (Some(ReplayCommand::Sweep(args)), _) => sweep_cells(args, control),
        (None, Some(args)) => replay(args, control),
        (None, None) => Err("--trace is missing".into()),
    };
    match ended {
        Ok(()) if exec::stopped(control) => 130,
        Ok(()) => 0,
        Err(message) => {
            eprintln!("error: {message}");
            2
        }
    }
}

impl RunArgs {
    fn setting(&self, trace: &Trace) -> Result<Setting, String> {
        let mut setting = Setting {
            prefill: self.prefill,
            decode: self.decode,
            kv_tokens: self.kv_tokens,
            sessions: self.sessions,
            arrival: self.arrival,
            time_scale: self.time_scale,
            shared_prefix: self.shared_prefix,
            seed: self.seed,
            seeds: self.seeds,
            cost_name: self.cost.clone(),
            cost: cost(&self.cost)?,
            ..Setting::default()
        };
        setting.lab.host_tokens = self.host_tokens;
        setting.lab.backup_share = backup_share(trace, self.kv_tokens);
        setting.set_block(self.block.unwrap_or(trace.block));
        for text in &self.set {
            setting.set(text)?;
        }
        if !setting.block.is_multiple_of(trace.block.max(1)) {
            return Err(format!("--block {}: not a multiple of the trace's {}", setting.block, trace.block));
        }
        setting.check()?;
        room_for_prompts(trace, &setting)?;
        Ok(setting)
    }

    fn jobs(&self) -> usize {
        self.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }
}

/// Tokens of the longest turn that a worker of `kv_tokens` can hold.
fn longest(trace: &Trace, kv_tokens: u64) -> u64 {
    let turns = trace.sessions.iter().flat_map(|s| &s.turns).map(|t| t.input + t.output);
    turns.filter(|n| *n <= kv_tokens).max().unwrap_or(0)
}

/// What of a P's own pool holds backups unless the user says otherwise: what the longest prompt leaves, at most 60 %
/// (in whole percents).
fn backup_share(trace: &Trace, kv_tokens: u64) -> f64 {
    let spare = 1.0 - 1.1 * longest(trace, kv_tokens) as f64 / kv_tokens.max(1) as f64;
    (spare.clamp(0.0, 0.6) * 100.0).floor() / 100.0
}

/// A P that sets memory aside must still hold the longest prompt that a D can hold.
fn room_for_prompts(trace: &Trace, setting: &Setting) -> Result<(), String> {
    let longest = longest(trace, setting.kv_tokens);
    let left = (setting.kv_tokens as f64 * (1.0 - setting.lab.backup_share)) as u64;
    let share = setting.lab.backup_share;
    match share > 0.0 && left < longest + u64::from(setting.block) {
        true => Err(format!("lab.backup_share = {share}: leaves a P {left} tokens, a prompt has {longest}")),
        false => Ok(()),
    }
}

fn cost(name: &str) -> Result<CostModel, String> {
    match name {
        "reference" => Ok(CostModel::reference()),
        "polynomial" => Ok(CostModel::polynomial()),
        path => {
            let text = std::fs::read_to_string(path).map_err(|e| format!("--cost {path}: {e}"))?;
            toml::from_str(&text).map_err(|e| format!("--cost {path}: {e}"))
        }
    }
}

fn replay(args: &RunArgs, control: &Control) -> Result<(), String> {
    let trace = Trace::read(&args.trace)?;
    let setting = args.setting(&trace)?;
    let policies = policy::list(&args.policies)?;
    let seeds = setting.seed..setting.seed + u64::from(setting.seeds);
    let units: Vec<Unit> = seeds.map(|seed| Unit { setting: setting.clone(), seed }).collect();
    let outcomes: Vec<Outcome> = exec::run(&trace, &units, &policies, args.jobs(), control, &|_, _| ())
        .into_iter()
        .flatten()
        .collect();
    let results = report::summarise(&names(&policies), &outcomes);
    let json = report::json(&trace.name, &setting, &results, exec::stopped(control));
    write(args.json.as_deref(), || format!("{json:#}"))?;
    write(args.html.as_deref(), || {
        html::page(&trace.name, &json["setting"], &results, exec::stopped(control))
    })?;
    if !to_stdout(args.json.as_deref()) {
        println!("{}", report::table(&results));
    }
    Ok(())
}

fn names(policies: &[&Policy]) -> Vec<&'static str> {
    policies.iter().map(|p| p.name).collect()
}

fn sweep_cells(args: &SweepArgs, control: &Control) -> Result<(), String> {
    let trace = Trace::read(&args.run.trace)?;
    let policies = policy::list(&args.run.policies)?;
    let mut cells = Vec::new();
    for sessions in &args.session_list {
        for kv_tokens in &args.kv_list {
            let run = RunArgs { kv_tokens: *kv_tokens, sessions: *sessions, ..args.run.clone() };
            let mut setting = run.setting(&trace)?;
            if let Some(factor) = args.host_factor {
                setting.lab.host_tokens = (*kv_tokens as f64 * factor.clamp(0.0, 1e6)) as u64;
            }
            cells.push(setting);
        }
    }
    let jobs = args.run.jobs();
    let (points, complete) = sweep::run(&trace, &cells, &policies, jobs, args.state.as_deref(), control)?;
    let each: Vec<Value> = points
        .iter()
        .zip(&cells)
        .map(|(point, setting)| report::json(&trace.name, setting, &point.results, false))
        .collect();
    let mut json = json!({"trace": trace.name, "cells": each});
    if !complete {
        json["partial"] = json!(true);
    }
    write(args.run.json.as_deref(), || format!("{json:#}"))?;
    write(args.run.html.as_deref(), || html::sweep(&trace.name, &points, !complete))?;
    if !to_stdout(args.run.json.as_deref()) {
        for point in points {
            println!("{} live, K_d {}\n{}\n", point.sessions, point.kv_tokens, report::table(&point.results));
        }
    }
    Ok(())
}

fn to_stdout(path: Option<&Path>) -> bool {
    path.is_some_and(|p| p.as_os_str() == "-")
}

/// Writes beside the target first, so that nobody ever sees half a report.
fn write(path: Option<&Path>, text: impl Fn() -> String) -> Result<(), String> {
    let Some(path) = path else { return Ok(()) };
    if to_stdout(Some(path)) {
        println!("{}", text());
        return Ok(());
    }
    let aside = path.with_extension("partial");
    let written = std::fs::write(&aside, text()).and_then(|()| std::fs::rename(&aside, path));
    written.map_err(|e| format!("{}: {e}", path.display()))
}
