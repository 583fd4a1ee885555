module epochkv/tools

go 1.26
