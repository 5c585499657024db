//! What is wrong with the settings, in one line a user can act on.

use std::fmt;

/// A problem with the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingsError {
    /// A file cannot be read or is no TOML.
    File {
        /// Its path as given.
        path: String,
        /// Why.
        problem: String,
    },
    /// A key nobody reads.
    UnknownKey {
        /// `section.key`.
        key: String,
        /// File, environment variable or flag that set it.
        origin: String,
        /// The nearest known key.
        nearest: Option<String>,
    },
    /// A value out of its type or range.
    Value {
        /// `section.key`.
        key: String,
        /// The value as TOML.
        value: String,
        /// File, environment variable or flag that set it.
        origin: String,
        /// What is allowed.
        allowed: String,
    },
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, problem } => write!(f, "{path}: {problem}"),
            Self::UnknownKey { key, origin, nearest } => {
                write!(f, "{origin}: unknown key `{key}`")?;
                match nearest {
                    Some(near) => write!(f, "; did you mean `{near}`?"),
                    None => Ok(()),
                }
            }
            Self::Value { key, value, origin, allowed } => {
                write!(f, "{origin}: `{key} = {value}` is not allowed: {allowed}")
            }
        }
    }
}

impl std::error::Error for SettingsError {}
