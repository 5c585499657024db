//! From layers to settings.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use config::{Config, Environment, File, FileFormat};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::{Settings, SettingsError, check};
use crate::core::options::{D2pTrigger, Options, Preset};

const DEFAULT: &str = include_str!("../../config/default.toml");
const PAPER: &str = include_str!("../../config/paper.toml");

/// Keys whose absence has a meaning of its own, with the word that stands for it.
const WORDS: [(&str, &str); 5] = [
    ("algorithm.epsilon", "all"),
    ("algorithm.d2p_staleness_budget_tokens", "inf"),
    ("node.d2p_host_tokens", "auto"),
    ("fleet.admission", "auto"),
    ("fleet.k_d", "auto"),
];

/// Where settings come from.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// The user's file.
    pub file: Option<PathBuf>,
    /// Environment variables; those that start with `KVC__` count.
    pub env: HashMap<String, String>,
    /// Flags as `(section.key, value)`; a list is separated by commas.
    pub flags: Vec<(String, String)>,
    /// Turn D→P sync on in the way the preset means it, unless a layer names a trigger.
    pub enable_d2p: bool,
}

/// Valid settings and the merged table they were read from.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    table: Table,
}

impl Loaded {
    /// The effective settings as TOML: reading it back gives the same settings, but for what is secret.
    pub fn to_toml(&self) -> String {
        let mut table = self.table.clone();
        let secret = table.get_mut("fleet").and_then(|fleet| fleet.get_mut("worker_key"));
        if let Some(Value::String(key)) = secret.filter(|key| key.as_str() != Some("")) {
            *key = "***".into();
        }
        toml::to_string_pretty(&table).unwrap_or_default()
    }
}

/// One layer: where it came from and what it sets.
struct Layer {
    origin: String,
    table: Table,
}

pub(super) fn load(layers: &Layers) -> Result<Loaded, SettingsError> {
    let schema = builtin(DEFAULT, "config/default.toml")?;
    let mut user = user_layers(layers, &schema)?;
    let mut enabled = layers.enable_d2p;
    for layer in &mut user {
        enabled = enable_key(layer)?.unwrap_or(enabled);
    }
    for layer in &user {
        known_keys(&layer.table, &schema, "", &layer.origin, &schema)?;
    }
    let mut all = vec![Layer { origin: "config/default.toml".into(), table: schema }];
    if preset_of(&user)? == Preset::Paper {
        all.push(Layer { origin: "config/paper.toml".into(), table: builtin(PAPER, "config/paper.toml")? });
    }
    all.extend(user);
    let mut table = merge(&all)?;
    if enabled {
        enable_d2p(&mut table);
    }
    let settings = typed(&table, &all)?;
    if let Some((key, value, allowed)) = check::invalid(&settings) {
        let origin = origin_of(&key, &all);
        return Err(SettingsError::Value { key, value, origin, allowed });
    }
    Ok(Loaded { settings, table })
}

fn builtin(text: &str, path: &str) -> Result<Table, SettingsError> {
    text.parse()
        .map_err(|e: toml::de::Error| SettingsError::File { path: path.into(), problem: e.to_string() })
}

/// The user's layers, lowest first.
fn user_layers(layers: &Layers, schema: &Table) -> Result<Vec<Layer>, SettingsError> {
    let mut out = Vec::new();
    if let Some(path) = &layers.file {
        out.push(Layer { origin: path.display().to_string(), table: read(path)? });
    }
    let source = Environment::with_prefix("KVC").prefix_separator("__").separator("__");
    let env = source.source(Some(layers.env.clone()));
    let env: Table = build(Config::builder().add_source(env), "environment")?;
    out.push(Layer { origin: "environment".into(), table: parsed(env, schema) });
    for (key, value) in &layers.flags {
        let table = nest(key, Value::String(value.clone()));
        out.push(Layer { origin: "command line".into(), table: parsed(table, schema) });
    }
    Ok(out)
}

fn read(path: &Path) -> Result<Table, SettingsError> {
    let problem = |problem: String| SettingsError::File { path: path.display().to_string(), problem };
    let text = std::fs::read_to_string(path).map_err(|e| problem(e.to_string()))?;
    text.parse().map_err(|e: toml::de::Error| problem(e.to_string().trim_end().to_owned()))
}

fn nest(key: &str, value: Value) -> Table {
    let (head, rest) = match key.split_once('.') {
        Some((head, rest)) => (head, Value::Table(nest(rest, value))),
        None => (key, value),
    };
    Table::from_iter([(head.to_owned(), rest)])
}

/// Texts of the environment and of flags, read as the type the default has.
/// What cannot be read stays a text, so that the error shows what the user wrote.
fn parsed(table: Table, schema: &Table) -> Table {
    let read = |(key, value): (String, Value)| {
        let value = match (value, schema.get(&key)) {
            (Value::Table(inner), Some(Value::Table(known))) => Value::Table(parsed(inner, known)),
            (Value::String(text), Some(known)) => parse_as(text, known),
            (value, _) => value,
        };
        (key, value)
    };
    table.into_iter().map(read).collect()
}

fn parse_as(text: String, known: &Value) -> Value {
    let parsed = match known {
        Value::Integer(_) => text.parse().ok().map(Value::Integer),
        Value::Float(_) => text.parse().ok().map(Value::Float),
        Value::Boolean(_) => text.parse().ok().map(Value::Boolean),
        Value::Array(_) => Some(Value::Array(list(&text))),
        // "all": a number or the word.
        Value::String(word) if WORDS.iter().any(|(_, w)| w == word) => text.parse().ok().map(Value::Integer),
        _ => None,
    };
    parsed.unwrap_or(Value::String(text))
}

/// A list as the file has it, in brackets, or with commas alone.
fn list(text: &str) -> Vec<Value> {
    let written = format!("list = {text}").parse::<Table>().ok();
    if let Some(Value::Array(list)) = written.and_then(|mut table| table.remove("list")) {
        return list;
    }
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(Value::from).collect()
}

/// Finds the first key that is not in the schema.
fn known_keys(
    table: &Table,
    schema: &Table,
    prefix: &str,
    origin: &str,
    root: &Table,
) -> Result<(), SettingsError> {
    for (key, value) in table {
        let path = format!("{prefix}{key}");
        match (schema.get(key), value) {
            (None, _) => {
                let nearest = nearest(&path, root);
                return Err(SettingsError::UnknownKey { key: path, origin: origin.into(), nearest });
            }
            (Some(Value::Table(known)), Value::Table(inner)) => {
                known_keys(inner, known, &format!("{path}."), origin, root)?;
            }
            (Some(Value::Table(_)), value) => {
                return Err(SettingsError::Value {
                    allowed: format!("a section: [{path}]"),
                    key: path,
                    value: value.to_string(),
                    origin: origin.into(),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The known key most like `path`: in its section when there is one, else a section or any key's last part.
fn nearest(path: &str, root: &Table) -> Option<String> {
    let (within, name) = path.split_once('.').map_or((None, path), |(s, leaf)| (Some(s), leaf));
    let mut known = Vec::new();
    for (section, value) in root.iter().filter(|(s, _)| within.is_none_or(|w| w == *s)) {
        if within.is_none() {
            known.push((section.as_str(), section.clone()));
        }
        let keys = value.as_table().into_iter().flat_map(Table::keys);
        known.extend(keys.map(|key| (key.as_str(), format!("{section}.{key}"))));
    }
    let scored = known.into_iter().map(|(leaf, key)| (strsim::jaro_winkler(leaf, name), key));
    // Reversed: of equals, `max_by` takes the last.
    let best = scored.rev().max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > 0.8).then_some(best.1)
}

fn preset_of(user: &[Layer]) -> Result<Preset, SettingsError> {
    let set = user.iter().rev().find_map(|layer| layer.table.get("algorithm")?.get("preset"));
    let Some(value) = set else { return Ok(Preset::default()) };
    value.clone().try_into().map_err(|_| SettingsError::Value {
        key: "algorithm.preset".into(),
        value: value.to_string(),
        origin: origin_of("algorithm.preset", user),
        allowed: "`paper` or `production`".into(),
    })
}

fn merge(layers: &[Layer]) -> Result<Table, SettingsError> {
    let mut builder = Config::builder();
    for layer in layers {
        builder = builder.add_source(File::from_str(&layer.table.to_string(), FileFormat::Toml));
    }
    build(builder, "settings")
}

fn build(
    builder: config::ConfigBuilder<config::builder::DefaultState>,
    what: &str,
) -> Result<Table, SettingsError> {
    builder
        .build()
        .and_then(Config::try_deserialize)
        .map_err(|e| SettingsError::File { path: what.into(), problem: e.to_string() })
}

/// The document's name for switching sync on or off as a whole: `algorithm.enable_d2p_sync`. It is no key of its
/// own: false is the trigger "off", true means what the flag means.
fn enable_key(layer: &mut Layer) -> Result<Option<bool>, SettingsError> {
    const KEY: &str = "enable_d2p_sync";
    let Some(Value::Table(algorithm)) = layer.table.get_mut("algorithm") else { return Ok(None) };
    let Some(value) = algorithm.remove(KEY) else { return Ok(None) };
    let enable = match &value {
        Value::Boolean(enable) => Some(*enable),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    match enable {
        Some(false) => drop(algorithm.insert("d2p_trigger".into(), "off".into())),
        Some(true) => {}
        None => {
            return Err(SettingsError::Value {
                key: format!("algorithm.{KEY}"),
                value: value.to_string(),
                origin: layer.origin.clone(),
                allowed: "true or false".into(),
            });
        }
    }
    Ok(enable)
}

/// `--enable-d2p-sync`: after each commit in `paper` (the document), on eviction in `production`.
fn enable_d2p(table: &mut Table) {
    let Some(Value::Table(algorithm)) = table.get_mut("algorithm") else { return };
    if algorithm.get("d2p_trigger").and_then(Value::as_str) != Some("off") {
        return;
    }
    let paper = algorithm.get("preset").and_then(Value::as_str) == Some("paper");
    let trigger = if paper { D2pTrigger::Commit } else { D2pTrigger::Evict };
    if let Ok(value) = Value::try_from(trigger) {
        algorithm.insert("d2p_trigger".into(), value);
    }
}

fn typed(table: &Table, layers: &[Layer]) -> Result<Settings, SettingsError> {
    let table = &without_words(table);
    let (preset, options) = algorithm(table, layers)?;
    let mut settings = Settings {
        http: section(table, "http", layers)?,
        preset,
        options,
        fleet: section(table, "fleet", layers)?,
        sessions: section(table, "sessions", layers)?,
        node: section(table, "node", layers)?,
        demo: section(table, "demo", layers)?,
    };
    let fleet = &mut settings.fleet;
    for url in fleet.prefill.iter_mut().chain(&mut fleet.decode).chain([&mut settings.node.engine_url]) {
        url.truncate(url.trim_end_matches('/').len());
    }
    Ok(settings)
}

/// A word stands for the key's absence.
fn without_words(table: &Table) -> Table {
    let mut table = table.clone();
    for (key, word) in WORDS {
        let (section, leaf) = key.split_once('.').unwrap_or((key, ""));
        let Some(Value::Table(section)) = table.get_mut(section) else { continue };
        if section.get(leaf).and_then(Value::as_str) == Some(word) {
            section.remove(leaf);
        }
    }
    table
}

fn algorithm(table: &Table, layers: &[Layer]) -> Result<(Preset, Options), SettingsError> {
    let mut table = table.clone();
    let mut preset = Preset::default();
    if let Some(Value::Table(algorithm)) = table.get_mut("algorithm")
        && let Some(value) = algorithm.remove("preset")
    {
        preset = value.try_into().unwrap_or_default(); // `preset_of` has checked it
    }
    Ok((preset, section(&table, "algorithm", layers)?))
}

fn section<T: DeserializeOwned>(table: &Table, name: &str, layers: &[Layer]) -> Result<T, SettingsError> {
    let value = table.get(name).cloned().unwrap_or_else(|| Value::Table(Table::new()));
    serde_path_to_error::deserialize(value).map_err(|e| {
        let key = format!("{name}.{}", e.path());
        let leaf = key.split(['.', '[']).nth(1).unwrap_or_default();
        let value = table.get(name).and_then(|s| s.get(leaf));
        SettingsError::Value {
            value: value.map(ToString::to_string).unwrap_or_default(),
            origin: origin_of(&format!("{name}.{leaf}"), layers),
            allowed: allowed(&key, e.inner().message()),
            key,
        }
    })
}

fn allowed(key: &str, message: &str) -> String {
    match WORDS.iter().find(|(other, _)| *other == key) {
        Some((_, word)) => format!("{message}, or \"{word}\""),
        None => message.to_owned(),
    }
}

/// Who set a key last.
fn origin_of(key: &str, layers: &[Layer]) -> String {
    let (section, leaf) = key.split_once('.').unwrap_or((key, ""));
    let set = |layer: &&Layer| layer.table.get(section).is_some_and(|s| s.get(leaf).is_some());
    layers.iter().rev().find(set).map_or_else(|| "settings".into(), |l| l.origin.clone())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
