//! JSON without what doesn't reach the model: white space, escapes, and fields that change from turn to turn.

use super::error::BadBody;
use super::json::Cursor;

/// Left out of an item: they name things or mark caches, and change while the prompt doesn't.
pub(crate) const ITEM: &[&str] = &[
    "id",
    "call_id",
    "tool_call_id",
    "tool_use_id",
    "status",
    "signature",
    "encrypted_content",
    "cache_control",
];
/// Left out of a tool: a schema may well have a property named `id`.
pub(crate) const TOOL: &[&str] = &["cache_control"];

/// Writes the value at the cursor without white space and with the fewest escapes, leaving out the members
/// named in `drop` at its top level. Order, duplicates and the spelling of numbers stay.
pub(crate) fn write(cursor: &mut Cursor<'_>, out: &mut Vec<u8>, drop: &[&str]) -> Result<(), BadBody> {
    // The grammar (and the depth) is checked once, so the recursion below is bounded.
    let text = cursor.skip()?;
    value(&mut Cursor::new(text), out, drop)
}

fn value(cursor: &mut Cursor<'_>, out: &mut Vec<u8>, drop: &[&str]) -> Result<(), BadBody> {
    let mut first = true;
    match cursor.peek() {
        Some(b'{') => {
            cursor.object()?;
            out.push(b'{');
            let start = out.len();
            while let Some(key) = cursor.key(&mut first)? {
                if drop.iter().any(|name| name.as_bytes() == &*key) {
                    cursor.skip()?;
                    continue;
                }
                comma(out, start);
                quoted(&key, out);
                out.push(b':');
                value(cursor, out, &[])?;
            }
            out.push(b'}');
        }
        Some(b'[') => {
            cursor.array()?;
            out.push(b'[');
            let start = out.len();
            while cursor.element(&mut first)? {
                comma(out, start);
                value(cursor, out, &[])?;
            }
            out.push(b']');
        }
        Some(b'"') => quoted(&cursor.string()?.bytes(), out),
        _ => out.extend_from_slice(cursor.scalar()?),
    }
    Ok(())
}

fn comma(out: &mut Vec<u8>, start: usize) {
    if out.len() > start {
        out.push(b',');
    }
}

/// Only what would end the string early is escaped.
fn quoted(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    let mut rest = text;
    while let Some(at) = memchr::memchr2(b'"', b'\\', rest) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(&[b'\\', rest[at]]);
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_form_for_all_spellings() {
        let mut forms = Vec::new();
        for text in [
            r#"{"a":"x\"\\\n","cache_control":1,"b":[1.50,{"cache_control":2}]}"#,
            "{ \"a\" : \"\\u0078\\u0022\\\\\\u000a\" , \"b\": [ 1.50 , {\"cache_control\":2} ], \"cache_control\":{\"x\":[]} }",
        ] {
            let mut out = Vec::new();
            write(&mut Cursor::new(text.as_bytes()), &mut out, TOOL).expect("json");
            forms.push(String::from_utf8(out).expect("utf-8"));
        }
        assert_eq!(forms[0], forms[1]);
        assert_eq!(forms[0], "{\"a\":\"x\\\"\\\\\n\",\"b\":[1.50,{\"cache_control\":2}]}");
    }
}
