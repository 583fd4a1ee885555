package config

import (
	"slices"
	"strings"
	"testing"
)

// TestListenersOffLoopbackNeedCertificatesOrInsecure: a server that other machines can reach starts only
// if it requires client certificates, or if its operator accepts the risk.
func TestListenersOffLoopbackNeedCertificatesOrInsecure(t *testing.T) {
	const secure = "--tls-cert=c --tls-key=k --tls-client-ca=a --tls-client-auth=require"
	for args, want := range map[string]string{
		"--listen=127.0.0.2:7400":                            "",
		"--listen=localhost:7400 --http=[::1]:7401":          "",
		"--listen=0.0.0.0:7400":                              "neither encryption nor authentication",
		"--listen=:7400":                                     "neither encryption nor authentication",
		"--listen=[::]:7400":                                 "--listen",
		"--listen=db1:7400":                                  "kvctl tls init",
		"--http=0.0.0.0:7401":                                "--http 0.0.0.0:7401",
		"--listen=0.0.0.0:7400 --insecure":                   "",
		"--listen=0.0.0.0:7400 --http=:7401 " + secure:       "",
		"--listen=0.0.0.0:7400 --tls-cert=c --tls-key=k":     "", // the start is refused if the store checks no users
		"--tls-cert=c --tls-key=k":                           "",
		"--tls-cert=c":                                       "--tls-key belong together",
		"--tls-key=k":                                        "--tls-key belong together",
		"--tls-client-auth=require":                          "without TLS",
		"--tls-cert=c --tls-key=k --tls-client-auth=require": "give --tls-client-ca",
		"--tls-cert=c --tls-key=k --tls-client-auth=request": "give --tls-client-ca",
		"--tls-cert=c --tls-key=k --tls-client-ca=a":         "choose one of them",
		secure + " --tls-client-auth=perhaps":                "none, request or require",
		secure + " --tls-client-user=cn":                     "",
		secure + " --tls-client-user=dn":                     "none, san-uri, san-dns or cn",
		"--tls-cert=c --tls-key=k --tls-client-user=cn":      "without client certificates",
		secure + " --tls-min=1.2":                            "",
		secure + " --tls-min=1.1":                            "--tls-min",
	} {
		in, err := Load(strings.Fields(args), nil)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
		exposed := slices.DeleteFunc(in.Config.Exposed(), func(e Exposed) bool { return e.UsersSuffice })
		if err == nil && len(exposed) > 0 != in.Config.TLS.Insecure {
			t.Errorf("%s: %v exposed", args, exposed)
		}
	}
}

// TestTLSIsPartOfTheMemoryBound: handshakes and connections over TLS are counted.
func TestTLSIsPartOfTheMemoryBound(t *testing.T) {
	plain, secure := Default(), Default()
	secure.TLS.Cert, secure.TLS.Key = "c", "k"
	if got, want := secure.MemoryBound()-plain.MemoryBound(), 36*MiB+1024*40*KiB; got != want {
		t.Errorf("TLS adds %v, want %v", got, want)
	}
}

// TestWatchesArePartOfTheMemoryBound, with every option that bounds what they hold.
func TestWatchesArePartOfTheMemoryBound(t *testing.T) {
	c := Default()
	if got, want := c.WatchMemory(), 64*MiB+64*MiB+100_000*KiB+4*16*MiB; got != want {
		t.Errorf("watches take %v, want %v", got, want)
	}
	more := c
	more.Feed.Memory += 100 * MiB
	more.Feed.Watches += 1024
	more.Limits.ValueSize += MiB
	if got := more.MemoryBound() - c.MemoryBound(); got != 105*MiB {
		t.Errorf("100 MiB of --feed-memory, 1,024 watches and 1 MiB of --max-value-size add %v", got)
	}
}

// TestTransactionsArePartOfTheMemoryBound: the share of open transactions, and the one beside it.
func TestTransactionsArePartOfTheMemoryBound(t *testing.T) {
	c := Default()
	if got, want := c.TransactionMemory(), 256*MiB+128*MiB; got != want {
		t.Errorf("with the defaults transactions take %v, want %v", got, want)
	}
	c.Limits.TxnSize = 16 * MiB
	if got, want := c.TransactionMemory(), 256*MiB+32*MiB; got != want {
		t.Errorf("transactions of up to 16 MiB take %v, want %v", got, want)
	}
	small := Default()
	small.Memory = 64 * MiB
	if got, want := small.TransactionMemory(), 64*MiB+64*MiB; got != want {
		t.Errorf("with --memory 64MiB transactions take %v, want %v", got, want)
	}
	before := small.MemoryBound()
	small.Limits.InflightBytes = 128 * MiB // 64 MiB more for requests, 64 for the share, and 64 for the one beside it
	if got := small.MemoryBound() - before; got != (128-16+64+64)*MiB {
		t.Errorf("--max-inflight-bytes of 128 MiB adds %v", got)
	}
}

// TestLeasesArePartOfTheMemoryBound: as many as may exist.
func TestLeasesArePartOfTheMemoryBound(t *testing.T) {
	c := Default()
	before := c.MemoryBound()
	c.Limits.Leases = 10_000
	if got, want := before-c.MemoryBound(), Size(990_000*LeaseBytes); got != want {
		t.Errorf("990,000 leases less lower the bound by %v, want %v", got, want)
	}
}

// TestTheArchiveIsInTheBound: its file and twice the largest batch, and for drills the store that they restore and as much again.
func TestTheArchiveIsInTheBound(t *testing.T) {
	c := Default()
	before := c.MemoryBound()
	c.Archive.URL, c.Archive.FileSize = "dir", 20*MiB
	if got, want := c.MemoryBound()-before, 20*MiB+2*c.Limits.BatchSize; got != want {
		t.Errorf("the archive adds %v, want %v", got, want)
	}
	archived := c.MemoryBound()
	c.Archive.Drill = 1
	if got, want := c.MemoryBound()-archived, DrillMemory+2*c.Limits.BatchSize; got != want {
		t.Errorf("drills add %v, want %v", got, want)
	}
}
