package main

import (
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"unicode/utf8"

	"github.com/epochkv/epochkv/client"
)

// A record is an entry on its way into or out of a file.
//
// As a line of JSON it is {"key":"...","value":"..."}. Bytes that are not UTF-8 are base64 under key_base64 or value_base64
// instead, so that every record survives the way out and in again; hexadecimal under key_hex or value_hex is
// for people.
type record struct {
	key, value []byte
	epoch      client.Epoch // 0: not said
	expiresAt  uint64       // milliseconds since 1970; 0: never
	lease      uint64       // 0: none
	keyOnly    bool         // no value, as opposed to an empty one
}

// appendJSON appends the record as one line of JSON, without the newline.
func (r *record) appendJSON(dst []byte, asHex bool) []byte {
	dst = append(dst, '{')
	dst = appendJSONField(dst, "key", r.key, asHex)
	if !r.keyOnly {
		dst = append(dst, ',')
		dst = appendJSONField(dst, "value", r.value, asHex)
	}
	if r.epoch != 0 {
		dst = append(dst, `,"epoch":`...)
		dst = strconv.AppendUint(dst, uint64(r.epoch), 10)
	}
	if r.expiresAt != 0 {
		dst = append(dst, `,"expires_at_ms":`...)
		dst = strconv.AppendUint(dst, r.expiresAt, 10)
	}
	if r.lease != 0 {
		dst = append(dst, `,"lease_id":`...)
		dst = strconv.AppendUint(dst, r.lease, 10)
	}
	return append(dst, '}')
}

func appendJSONField(dst []byte, name string, b []byte, asHex bool) []byte {
	dst = append(dst, '"')
	dst = append(dst, name...)
	switch {
	case asHex:
		dst = append(dst, `_hex":"`...)
		dst = hex.AppendEncode(dst, b)
		return append(dst, '"')
	case !utf8.Valid(b):
		dst = append(dst, `_base64":"`...)
		dst = base64.StdEncoding.AppendEncode(dst, b)
		return append(dst, '"')
	}
	dst = append(dst, `":`...)
	return appendJSONString(dst, b)
}

// appendJSONString appends valid UTF-8 as a JSON string, exactly as encoding/json does without HTML escapes. Records that
// other programs make in that way can be compared with an export byte by byte.
func appendJSONString(dst, text []byte) []byte {
	const digits = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(text); i++ {
		c := text[i]
		separator := c == 0xe2 && i+2 < len(text) && text[i+1] == 0x80 && text[i+2]&^1 == 0xa8 // U+2028 and U+2029
		if c >= ' ' && c != '"' && c != '\\' && !separator {
			continue
		}
		dst = append(dst, text[start:i]...)
		if separator {
			dst = append(dst, `\u202`...)
			dst = append(dst, digits[text[i+2]&15])
			i += 2
		} else {
			dst = appendEscaped(dst, c, digits)
		}
		start = i + 1
	}
	dst = append(dst, text[start:]...)
	return append(dst, '"')
}

func appendEscaped(dst []byte, c byte, digits string) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	}
	return append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
}
