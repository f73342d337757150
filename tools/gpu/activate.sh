# Source this on the GPU machine, in the repository's root, after carrying .gpu/ there:
#     source tools/gpu/activate.sh
# It unpacks what `python -m tools.gpu` packed and puts it on PYTHONPATH; a second time it only sets
# the variables. MINISGL_GPU_SITE names the folder.
MINISGL_GPU_SITE=${MINISGL_GPU_SITE:-/tmp/minisgl-gpu}
for archive in .gpu/*.tar.xz; do
    [ -e "$archive" ] || { echo "no archives in .gpu/: run python -m tools.gpu kernels" >&2; return 1; }
    name=$(basename "$archive" .tar.xz)
    if [ ! -e "$MINISGL_GPU_SITE/$name/.complete" ]; then
        mkdir -p "$MINISGL_GPU_SITE/$name"
        tar -C "$MINISGL_GPU_SITE/$name" -xJf "$archive" && touch "$MINISGL_GPU_SITE/$name/.complete"
    fi
    # numpy 1 among the server's files is for the stub's Python alone: see MINISGL_STUB_SITE
    [ "$name" = kernels ] && PYTHONPATH="$MINISGL_GPU_SITE/kernels${PYTHONPATH:+:$PYTHONPATH}"
done
[ -e "$MINISGL_GPU_SITE/server" ] && export MINISGL_STUB_SITE="$MINISGL_GPU_SITE/server"
export MINISGL_GPU_SITE PYTHONPATH="$PWD:$PWD/client${PYTHONPATH:+:$PYTHONPATH}"
