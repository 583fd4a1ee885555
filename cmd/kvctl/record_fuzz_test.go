package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"testing"
	"unicode/utf8"
)

// Whatever bytes a record has, a line of JSON carries them, and any JSON reader sees the same text.
func FuzzRecordSurvivesJSON(f *testing.F) {
	f.Add([]byte("key"), []byte("value"), false)
	f.Add([]byte{0xff, 0}, []byte("\x00\x1f\b\f\x7f<&>\"\\\r\n\t\u2028\u2029\u202a\ufffdé"), false)
	f.Add([]byte("k"), []byte{}, true)
	f.Fuzz(func(t *testing.T, key, value []byte, asHex bool) {
		if len(key) == 0 {
			return
		}
		in := record{key: key, value: value}
		line := in.appendJSON(nil, asHex)
		if bytes.ContainsAny(line, "\n\r") {
			t.Fatalf("more than one line: %q", line)
		}
		out, err := parseJSONLine(line)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if !bytes.Equal(out.key, key) || !bytes.Equal(out.value, value) {
			t.Fatalf("%q, %q came back as %q, %q", key, value, out.key, out.value)
		}
		var fields map[string]string
		if err := json.Unmarshal(line, &fields); err != nil {
			t.Fatalf("%q is not JSON: %v", line, err)
		}
		if text, ok := fields["value"]; ok && text != string(value) {
			t.Fatalf("%q means %q to others, not %q", line, text, value)
		}
		var theirs bytes.Buffer
		encoder := json.NewEncoder(&theirs)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(string(value)); err != nil {
			t.Fatal(err)
		}
		if ours := appendJSONString(nil, value); utf8.Valid(value) && string(ours)+"\n" != theirs.String() {
			t.Fatalf("%s is not what encoding/json writes: %s", ours, theirs.String())
		}
	})
}

// A line that import takes means one record, which export writes and import reads again.
func FuzzParseJSONLine(f *testing.F) {
	for _, line := range []string{
		`{"key":"a","value":"b"}`, `{"key_base64":"/w==","value_hex":"00","epoch":7}`, `{"key":"\ud83d\ude00","value":"\ud800"}`,
		`{"key":"a","key_hex":"61","value":""}`, `{"key":1}`, `[]`, `{`, ``, `{"key":"a","value":"b"} {}`,
		"\t{ \"value\" : \"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\" , \"key\":\"k\" , \"epoch\" : 10 }\r", `{"key":"a","value":"b","epoch":01}`, `{"key":"a","value":"b","x":0}`,
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := parseJSONLine(line)
		if err != nil {
			return
		}
		if len(r.key) == 0 {
			t.Fatalf("%q gave an empty key", line)
		}
		// Whatever the parser takes is JSON, and text means the same to others.
		var fields map[string]any
		if err := json.Unmarshal(line, &fields); err != nil {
			t.Fatalf("%q is not JSON: %v", line, err)
		}
		if text, ok := fields["value"].(string); ok && text != string(r.value) {
			t.Fatalf("%q means %q to others, not %q", line, text, r.value)
		}
		again, err := parseJSONLine(r.appendJSON(nil, false))
		if err != nil || !bytes.Equal(again.key, r.key) || !bytes.Equal(again.value, r.value) || again.epoch != r.epoch || again.expiresAt != r.expiresAt || again.lease != r.lease {
			t.Fatalf("%q: %+v came back as %+v, %v", line, r, again, err)
		}
	})
}

// A CSV file either gives the records that were written, or an error with the line; never something else.
func FuzzParseCSV(f *testing.F) {
	for _, file := range []string{
		"key,value\na,b\n", "value,key_base64\nx,AA==\n", "key,value\n\"a\nb\",\"\"\"\"\n", "key,value\n\"a", "a,b\n", "", "key,value\n,b\n",
		"key,value\r\n\"a\r\nb\",c\r\n", "lease_id,key,expires_at_ms,value\n7,a,1700000000000,b\n,c,,d\n",
	} {
		f.Add([]byte(file))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		records := readCSV(t, file)
		for _, inBase64 := range []bool{false, true} {
			var out bytes.Buffer
			sink := newCSVSink(&out, inBase64, true)
			for i := range records {
				if err := sink.write(&records[i]); err != nil {
					if inBase64 {
						t.Fatalf("base64 refused %q: %v", records[i].key, err)
					}
					return
				}
			}
			if err := sink.close(); err != nil {
				t.Fatal(err)
			}
			again := readCSV(t, out.Bytes())
			if len(again) != len(records) {
				t.Fatalf("%q: %d records came back as %d", out.Bytes(), len(records), len(again))
			}
			for i := range records {
				same := again[i].expiresAt == records[i].expiresAt && again[i].lease == records[i].lease
				if !same || !bytes.Equal(again[i].key, records[i].key) || !bytes.Equal(again[i].value, records[i].value) {
					t.Fatalf("%q: record %d %+v came back as %+v", out.Bytes(), i, records[i], again[i])
				}
			}
		}
	})
}

// readCSV reads records until the first error, which must name a line.
func readCSV(t *testing.T, file []byte) []record {
	t.Helper()
	var records []record
	source := newCSVSource(bytes.NewReader(file), 1<<20)
	for {
		r, line, err := source.next()
		if errors.Is(err, io.EOF) {
			return records
		}
		if line <= 0 {
			t.Fatalf("%q: error %v names line %d", file, err, line)
		}
		if err != nil {
			return records
		}
		if len(r.key) == 0 {
			t.Fatalf("%q gave an empty key", file)
		}
		records = append(records, r)
	}
}

func TestTextThatCSVCannotCarryIsRefused(t *testing.T) {
	for _, value := range []string{"a\rb", "a\r\n", "\xff"} {
		sink := newCSVSink(io.Discard, false, false)
		if err := sink.write(&record{key: []byte("k"), value: []byte(value)}); err == nil {
			t.Errorf("%q was written as text, though readers would change it", value)
		}
	}
	if !utf8.ValidString("a\rb") {
		t.Fatal("the first case must fail for its carriage return")
	}
}
