package mvcc
import ("testing";"time";"context";"encoding/binary";"epochkv/internal/storage";"fmt")
func TestZZ(t *testing.T){
 for range 4 {
 s,err:=Open(Options{Storage: storage.Options{Dir:t.TempDir(), MemoryBytes:1<<30}}); if err!=nil{t.Fatal(err)}
 t0:=time.Now()
 l,_:=s.BulkLoad(); key,value:=make([]byte,16),make([]byte,100)
 for i:=range uint64(2000000){ binary.BigEndian.PutUint64(key,i); binary.LittleEndian.PutUint64(value,i); l.Add(key,value)}
 t1:=time.Now()
 l.load.Prepare(context.Background()); t2:=time.Now()
 s.Checkpoint(context.Background()); t3:=time.Now()
 e,err:=l.reserve(context.Background()); t4:=time.Now()
 err=l.publish(context.Background(),e); t5:=time.Now()
 s.loading.Store(0); s.horizon.done(e)
 fmt.Println("add",t1.Sub(t0),"prepare",t2.Sub(t1),"ckpt",t3.Sub(t2),"reserve",t4.Sub(t3),"publish",t5.Sub(t4), err, "total rate", 2e6/t5.Sub(t0).Seconds())
 l.Close(); s.Close()
 }
}
