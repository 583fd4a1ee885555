package main

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"epochkv/client"
)

// A record is an entry on its way into or out of a file.
//
// As a line of JSON it is {"key":"...","value":"..."}. Bytes that are not UTF-8 stand in base64 under key_base64 or value_base64
// instead, so that every record survives the way out and in again; hexadecimal under key_hex or value_hex is
// for people.
type record struct {
	key, value []byte
	epoch      client.Epoch // 0: not said
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

// appendJSONString appends valid UTF-8 as a JSON string, exactly as encoding/json does without HTML escapes: whoever makes
// records with that can compare them with an export byte by byte.
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

// jsonLine is a record as encoding/json sees it.
type jsonLine struct {
	Key         *string `json:"key"`
	KeyBase64   *string `json:"key_base64"`
	KeyHex      *string `json:"key_hex"`
	Value       *string `json:"value"`
	ValueBase64 *string `json:"value_base64"`
	ValueHex    *string `json:"value_hex"`
	Epoch       uint64  `json:"epoch"` // what export wrote; import gives new ones
}

// parseJSONLine reads one line of JSON. It is strict: a field it does not know, a value given twice or not at all, and text that
// would not come out again as it went in are errors, since an import that guesses loses data.
func parseJSONLine(line []byte) (record, error) {
	if !utf8.Valid(line) {
		return record{}, errors.New("not UTF-8; bytes belong under key_base64 or value_base64")
	}
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	var fields jsonLine
	if err := decoder.Decode(&fields); err != nil {
		return record{}, jsonError(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return record{}, errors.New("something follows the JSON object")
	}
	key, err := oneOf("key", fields.Key, fields.KeyBase64, fields.KeyHex, line)
	if err != nil {
		return record{}, err
	}
	value, err := oneOf("value", fields.Value, fields.ValueBase64, fields.ValueHex, line)
	if err != nil {
		return record{}, err
	}
	if len(key) == 0 {
		return record{}, errors.New("the key is empty")
	}
	return record{key: key, value: value, epoch: client.Epoch(fields.Epoch)}, nil
}

// jsonError rids an error of what its reader cannot know: Go's type names.
func jsonError(err error) error {
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(err, &mismatch) && mismatch.Field == "":
		return fmt.Errorf("a JSON object is expected, found %s", mismatch.Value)
	case errors.As(err, &mismatch):
		return fmt.Errorf("field %q has the wrong type: %s", mismatch.Field, mismatch.Value)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the JSON object does not end")
	}
	return errors.New(strings.TrimPrefix(err.Error(), "json: "))
}

// oneOf decodes the one encoding in which a field is given.
func oneOf(name string, text, inBase64, inHex *string, line []byte) ([]byte, error) {
	given := 0
	for _, field := range []*string{text, inBase64, inHex} {
		if field != nil {
			given++
		}
	}
	if given != 1 {
		return nil, fmt.Errorf("exactly one of %s, %s_base64 and %s_hex must be given, not %d", name, name, name, given)
	}
	switch {
	case inBase64 != nil:
		b, err := base64.StdEncoding.Strict().DecodeString(*inBase64)
		if err != nil {
			return nil, fmt.Errorf("%s_base64: %w", name, err)
		}
		return b, nil
	case inHex != nil:
		b, err := hex.DecodeString(*inHex)
		if err != nil {
			return nil, fmt.Errorf("%s_hex: %w", name, err)
		}
		return b, nil
	}
	return decodedText(name, *text, line)
}

// decodedText refuses text in which the decoder had to replace half a surrogate pair: it would be stored as something else.
func decodedText(name, text string, line []byte) ([]byte, error) {
	const replacement = "�"
	if strings.Contains(text, replacement) && !bytes.Contains(line, []byte(replacement)) &&
		!bytes.Contains(bytes.ToLower(line), []byte(`\ufffd`)) {
		return nil, fmt.Errorf("%s has half a surrogate pair; bytes belong under %s_base64", name, name)
	}
	return []byte(text), nil
}
