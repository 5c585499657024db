//! One message (Chat, Messages) or one input item (Responses) in canonical form.

use super::api::Api;
use super::canonical::{ItemKind, NAME, Writer};
use super::content::{call, content, note_call, reasoning};
use super::error::BadBody;
use super::json::{Cursor, Text};
use super::neutral;

type Result<T> = std::result::Result<T, BadBody>;

/// What an item says about itself, found on the way through it.
#[derive(Default)]
struct Fields<'a> {
    role: Option<Text<'a>>,
    kind: Option<Text<'a>>,
    name: Option<Text<'a>>,
    content: Option<&'a [u8]>,
    calls: Option<&'a [u8]>,
    reasoning: Option<&'a [u8]>,
    summary: Option<&'a [u8]>,
    arguments: Option<&'a [u8]>,
    output: Option<&'a [u8]>,
    /// The kind of item whose header and content are written already.
    open: Option<ItemKind>,
}

/// Writes the item at the cursor; `param` is the field it stands in.
pub(crate) fn item(w: &mut Writer, cursor: &mut Cursor<'_>, api: Api, param: &'static str) -> Result<()> {
    match cursor.peek() {
        Some(b'{') => {}
        Some(_) => return Err(BadBody::field(param, "must be an array of objects")),
        None => return Err(BadBody::malformed(cursor.at())),
    }
    let start = cursor.at();
    let fields = read(w, cursor)?;
    let kind = fields.kind.map(Text::bytes);
    match (fields.open, kind.as_deref()) {
        (Some(open), _) => {
            finish(w, &fields, open)?;
            w.close(open);
            Ok(())
        }
        (None, Some(b"function_call")) => function_call(w, &fields),
        (None, Some(b"function_call_output")) => {
            w.open(b"tool", ItemKind::Tool);
            maybe(w, fields.output, content)?;
            w.close(ItemKind::Tool);
            Ok(())
        }
        (None, Some(b"reasoning")) => {
            w.open(b"assistant", ItemKind::Assistant);
            maybe(w, fields.summary, reasoning)?;
            maybe(w, fields.content, reasoning)?;
            w.close(ItemKind::Assistant);
            Ok(())
        }
        (None, _) if fields.role.is_some() => message(w, &fields),
        (None, Some(kind)) if api == Api::Responses => other(w, kind, cursor.since(start)),
        _ => Err(BadBody::field(param, "has an entry without a `role`")),
    }
}

/// Reads the members; the content of a message whose role is known by then goes straight to the writer.
fn read<'a>(w: &mut Writer, cursor: &mut Cursor<'a>) -> Result<Fields<'a>> {
    let (mut f, mut first) = (Fields::default(), true);
    cursor.object()?;
    while let Some(key) = cursor.key(&mut first)? {
        match &*key {
            b"role" => f.role = cursor.opt_string()?.or(f.role),
            b"type" => f.kind = cursor.opt_string()?.or(f.kind),
            b"name" => f.name = cursor.opt_string()?,
            b"content" if f.open.is_none() => match f.role.map(|role| (role, role_kind(&role.bytes()))) {
                // Reasoning stands before what an assistant says, wherever its key stands.
                Some((role, kind)) if kind != ItemKind::Assistant => {
                    w.open(&role.bytes(), kind);
                    content(w, cursor)?;
                    f.open = Some(kind);
                }
                _ => f.content = Some(cursor.skip()?),
            },
            b"output" if f.open.is_none() && is_kind(f.kind, b"function_call_output") => {
                w.open(b"tool", ItemKind::Tool);
                content(w, cursor)?;
                f.open = Some(ItemKind::Tool);
            }
            b"output" => f.output = Some(cursor.skip()?),
            b"tool_calls" => f.calls = Some(cursor.skip()?),
            b"function_call" => f.calls = Some(cursor.skip()?),
            b"reasoning_content" | b"reasoning" => f.reasoning = Some(cursor.skip()?),
            b"summary" => f.summary = Some(cursor.skip()?),
            b"arguments" => f.arguments = Some(cursor.skip()?),
            b"tool_call_id" | b"call_id" => note_call(w, cursor)?,
            _ => {
                cursor.skip()?;
            }
        }
    }
    Ok(f)
}

fn message(w: &mut Writer, f: &Fields<'_>) -> Result<()> {
    let role = f.role.map(Text::bytes).unwrap_or_default();
    let kind = role_kind(&role);
    w.open(&role, kind);
    if kind == ItemKind::Assistant {
        maybe(w, f.reasoning, reasoning)?;
    }
    maybe(w, f.content, content)?;
    finish(w, f, kind)?;
    w.close(kind);
    Ok(())
}

/// What follows the content of a message.
fn finish(w: &mut Writer, f: &Fields<'_>, kind: ItemKind) -> Result<()> {
    if kind == ItemKind::Assistant {
        return maybe(w, f.calls, tool_calls);
    }
    if let Some(name) = f.name {
        w.buf.push(NAME);
        name.decode_into(&mut w.buf);
    }
    Ok(())
}

fn function_call(w: &mut Writer, f: &Fields<'_>) -> Result<()> {
    w.open(b"assistant", ItemKind::Assistant);
    call(w, f.name, &mut Cursor::new(f.arguments.unwrap_or(b"null")))?;
    w.close(ItemKind::Assistant);
    Ok(())
}

/// `tool_calls` of a chat message, or its older form, one `function_call`.
fn tool_calls(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    match cursor.peek() {
        Some(b'[') => {
            let mut first = true;
            cursor.array()?;
            while cursor.element(&mut first)? {
                tool_calls(w, cursor)?;
            }
            Ok(())
        }
        Some(b'{') => tool_call(w, cursor),
        _ => cursor.skip().map(drop),
    }
}

fn tool_call(w: &mut Writer, cursor: &mut Cursor<'_>) -> Result<()> {
    let (mut first, mut name, mut arguments) = (true, None, None);
    cursor.object()?;
    while let Some(key) = cursor.key(&mut first)? {
        match &*key {
            b"id" => note_call(w, cursor)?,
            b"name" => name = cursor.opt_string()?,
            b"arguments" | b"input" => arguments = Some(cursor.skip()?),
            b"function" | b"custom" => function_of(cursor, &mut name, &mut arguments)?,
            _ => {
                cursor.skip()?;
            }
        }
    }
    call(w, name, &mut Cursor::new(arguments.unwrap_or(b"null")))
}

/// The `function` member of a chat tool call.
fn function_of<'a>(
    cursor: &mut Cursor<'a>,
    name: &mut Option<Text<'a>>,
    arguments: &mut Option<&'a [u8]>,
) -> Result<()> {
    if cursor.peek() != Some(b'{') {
        return cursor.skip().map(drop);
    }
    let mut first = true;
    cursor.object()?;
    while let Some(key) = cursor.key(&mut first)? {
        match &*key {
            b"name" => *name = cursor.opt_string()?,
            b"arguments" | b"input" => *arguments = Some(cursor.skip()?),
            _ => {
                cursor.skip()?;
            }
        }
    }
    Ok(())
}

/// Any other input item of the Responses API: its JSON without what is neutral.
fn other(w: &mut Writer, kind: &[u8], whole: &[u8]) -> Result<()> {
    let of = if kind.ends_with(b"_output") { ItemKind::Tool } else { ItemKind::Assistant };
    w.open(kind, of);
    neutral::write(&mut Cursor::new(whole), &mut w.buf, neutral::ITEM)?;
    w.close(of);
    Ok(())
}

fn maybe(
    w: &mut Writer,
    value: Option<&[u8]>,
    write: fn(&mut Writer, &mut Cursor<'_>) -> Result<()>,
) -> Result<()> {
    value.map_or(Ok(()), |text| write(w, &mut Cursor::new(text)))
}

fn is_kind(kind: Option<Text<'_>>, name: &[u8]) -> bool {
    kind.is_some_and(|kind| *kind.bytes() == *name)
}

fn role_kind(role: &[u8]) -> ItemKind {
    match role {
        b"system" | b"developer" => ItemKind::System,
        b"assistant" | b"model" => ItemKind::Assistant,
        b"tool" | b"function" => ItemKind::Tool,
        _ => ItemKind::User,
    }
}
