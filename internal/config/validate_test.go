package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
)

func TestBoundsAreExact(t *testing.T) {
	for _, row := range []struct{ option, inside, outside string }{
		{"memory", "32MiB", "33554431"},
		{"page-size", "4KiB", "2KiB"},
		{"page-size", "64KiB", "128KiB"},
		{"page-size", "16KiB", "12KiB"},
		{"segment-size", "64KiB", "65535"},
		{"segment-size", "256MiB", "268435457"},
		{"memtable-size", "256KiB", "262143"},
		{"disk-reserve", "1MiB", "1048575"},
		{"disk-reserve", "1024TiB", "1125899906842625"},
		{"memtable-size", "256KiB", "4611686018427387904"}, // twice that is nothing in 64 bits
		{"memory", "1024TiB", "1125899906842625"},
		{"cache-size", "1GiB", "1073741825"},
		{"max-value-size", "1", "0"},
		{"max-value-size", "64MiB", "67108865"}, // a value must fit into a batch
		{"max-batch-size", "16MiB", "16777215"}, // the same from the other side
		{"max-batch-size", fmt.Sprint(storage.BatchBytesMax(200_000)), fmt.Sprint(storage.BatchBytesMax(200_000) + 1)}, // a record of the log
		{"max-inflight-bytes", "64MiB", "64MiB0"}, // not a size
		{"max-inflight-bytes", "64MiB", "67108863"},
		{"max-inflight-bytes", "1024TiB", "4611686018427387904"}, // of which a quarter of its sixteenths is nothing in 64 bits
		{"max-connections", "1", "0"},
		{"max-connections", "2925", "2926"}, // what the bound of resident memory carries
		{"message-timeout", "10ms", "9ms"},
		{"max-streams", "1", "0"},
		{"max-inflight-requests", "1", "-1"},
		{"max-batch-ops", "1", "0"},
		{"sync-interval", "1ms", "999us"},
		{"sync-interval", "1m", "1m1ns"},
		{"retention", "0s", "-1s"},
		{"probe-interval", "10ms", "9ms"},
		{"probe-interval", "0s", "-1s"},
		{"probe-timeout", "1h", "1h1ns"},
		{"drain-timeout", "1h", "1h1ns"},
		{"close-timeout", "1h", "1h1ns"},
		{"close-timeout", "100ms", "99ms"},
		{"snapshot-lease-ttl", "1s", "999ms"},
		{"snapshot-timeout", "10ms", "9ms"},
		{"snapshot-timeout", "0s", "-1s"},
		{"durability", "async", "maybe"},
		{"log-format", "json", "xml"},
		{"log-level", "warn", "loud"},
		{"listen", "[::1]:0", "7400"},
		{"http", "", "localhost"},
		{"http", "127.0.0.1:7401", "127.0.0.1:7400"}, // that is --listen
		{"data-dir", "x", ""},
		{"trace-endpoint", "grpc://127.0.0.1:4317", "127.0.0.1:4317"},
		{"trace-endpoint", "https://[::1]:4318/v1/traces", "https://collector"}, // no port
		{"trace-endpoint", "grpcs://collector:4317/", "grpcs://collector:4317/path"},
		{"trace-endpoint", "http://collector:4318", "http://user:secret@collector:4318"},
		{"trace-endpoint", "", "http://collector:4318?x=y"},
		{"trace-endpoint", "", "ftp://collector:4318"},
		{"trace-endpoint", "", "grpc://:4317"},
		{"trace-endpoint", "", "%"},
		{"trace-ratio", "0", "-0.1"},
		{"trace-ratio", "1", "1.1"},
		{"trace-ratio", "0.5", "NaN"},
		{"trace-tls-ca", "", "ca.pem"}, // without an endpoint
	} {
		args := []string{"--" + row.option + "=" + row.inside}
		if row.option == "segment-size" || row.option == "memory" {
			args = append(args, "--memory="+map[string]string{"segment-size": "2GiB", "memory": row.inside}[row.option])
		}
		if _, err := Load(args, nil); err != nil {
			t.Errorf("%q: %v", args, err)
		}
		_, err := Load([]string{"--" + row.option + "=" + row.outside}, nil)
		if err == nil || !strings.Contains(err.Error(), row.option) {
			t.Errorf("--%s=%s: got %v, want an error that names the option", row.option, row.outside, err)
		}
	}
}

// TestAnArchiveHasNoCredentials: they would be in logs, and for every client that may see the options.
func TestAnArchiveHasNoCredentials(t *testing.T) {
	for _, url := range []string{"s3://key:secret@bucket/prefix", "s3://key:sec/secret@bucket", "s3://secret@bucket"} {
		if _, err := Load([]string{"--archive=" + url}, nil); err == nil || !strings.Contains(err.Error(), "archive") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", url, err)
		}
	}
	if _, err := Load([]string{"--archive=s3://bucket/a@b:c"}, nil); err != nil {
		t.Error(err)
	}
}

// TestTraceFilesNeedTLS, and no complaint about an endpoint shows a password that is in it.
func TestTraceFilesNeedTLS(t *testing.T) {
	for _, args := range [][]string{
		{"--trace-endpoint=grpc://c:4317", "--trace-tls-ca=ca.pem"},
		{"--trace-endpoint=http://c:4318", "--trace-tls-cert=c.pem", "--trace-tls-key=k.pem"},
		{"--trace-endpoint=grpcs://c:4317", "--trace-tls-cert=c.pem"},
		{"--trace-endpoint=https://c:4318", "--trace-tls-key=k.pem"},
		{"--trace-endpoint=grpc://user:secret@c:4317", "--trace-tls-ca=ca.pem"},
		{"--trace-endpoint=://user:secret@c"},
	} {
		if _, err := Load(args, nil); err == nil || !strings.Contains(err.Error(), "trace-") || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", args, err)
		}
	}
	if c, err := Load([]string{"--trace-endpoint=grpcs://c:4317", "--trace-tls-ca=ca.pem", "--trace-tls-cert=c.pem", "--trace-tls-key=k.pem"}, nil); err != nil || !c.Config.Traces.Enabled() {
		t.Error(err)
	}
}

// TestCacheFitsItsTable derives the cache from a very large --memory: it stays below the largest
// number of pages that the table of the page cache can have.
func TestCacheFitsItsTable(t *testing.T) {
	most := storage.CacheBytesMax(8 << 10)
	for bytes, ok := range map[int64]bool{0: true, most: true, most + 1: false} {
		_, err := Load([]string{"--memory=1TiB", fmt.Sprintf("--cache-size=%d", bytes)}, nil)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "--cache-size") {
			t.Errorf("--cache-size=%d: %v", bytes, err)
		}
	}
}

func TestEveryComplaintIsReportedAtOnce(t *testing.T) {
	_, err := Load([]string{"--memory=1MiB", "--page-size=1KiB", "--listen=x"}, nil)
	for _, option := range []string{"--memory", "--page-size", "--listen"} {
		if err == nil || !strings.Contains(err.Error(), option) {
			t.Errorf("%v does not mention %s", err, option)
		}
	}
}

func TestSubLimitsMustFitIntoMemory(t *testing.T) {
	if _, err := Load([]string{"--memory=64MiB", "--cache-size=32MiB", "--memtable-size=8MiB", "--segment-size=16MiB"}, nil); err != nil {
		t.Errorf("exactly full: %v", err)
	}
	if _, err := Load([]string{"--memory=64MiB", "--cache-size=32MiB", "--memtable-size=8MiB", "--segment-size=16777217"}, nil); err == nil {
		t.Error("one byte too many was accepted")
	}
}

// TestConnectionsAndStreamsStayInTheirPartOfTheBound tries many configurations: all connections and
// streams fit into their part of the bound, and streams are left with the most connections.
func TestConnectionsAndStreamsStayInTheirPartOfTheBound(t *testing.T) {
	for _, memory := range []Size{memoryMin, 64 * MiB, GiB, 64 * GiB} {
		c := Default()
		c.Memory = memory
		for _, connections := range []int{1, c.Limits.Connections, c.connectionsMax()} {
			c.Limits.Connections = connections
			streams := c.StreamsTotal()
			if taken := Size(connections)*connectionBytes + Size(streams)*streamBytes; taken > c.carried() || streams < connections/2 {
				t.Errorf("%v: %d connections and %d streams take %v of %v", memory, connections, streams, taken, c.carried())
			}
		}
		if c.carried() > c.MemoryBound()-c.LeaseMemory()-c.Memory {
			t.Errorf("%v: %v are carried, beyond the bound", memory, c.carried())
		}
	}
}
